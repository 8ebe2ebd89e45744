"""Prints the three tables of `README.md` from the recorded results.

    python benchmarks/summary.py [cost | autocast | models] [--record]

It measures nothing. `--record` writes the tables into `README.md`.
"""

import argparse
import pathlib
from typing import Any

from _lib.tables import recorded, table_of, with_output
from real_models import TASKS, load, rows_of

README = pathlib.Path(__file__).parent / "README.md"
NAMES = {"resnet": "ResNet"}
DEVICES = ["V100", "H200", "TPU v5e"]
Row = dict[str, Any]


def one(rows: list[Row], **labels: str) -> Row | None:
    """Returns the row that has some labels, or `None`; `_` stands for a space."""
    wanted = {key.replace("_", " "): value for key, value in labels.items()}
    found = [row for row in rows if wanted.items() <= row.items()]
    return found[0] if found else None


def cost_rows() -> list[Row]:
    """Returns what a step with loss scaling costs, for each model and precision."""
    compiled, timed = recorded("whole_step"), recorded("on_h100")
    rows = []
    for model in ("GPT", "ResNet-18", "LSTM"):
        for way in ("by hand", "autocast, O1", "autocast, O2", "masters"):
            labels = {"precision": way, "loss_scaling": "loss_scaled"}
            row = {"model": model, "precision": way.removeprefix("autocast, ")}
            for device in DEVICES:
                found = one(compiled[model], compiled_for=device, **labels)
                share = found["loss scaling's share"] if found else ""
                row[f"{device}: bytes added"] = share
            found = one(timed[model], **labels)
            row["H100: time / bare"] = found["time / bare"] if found else ""
            rows.append(row)
    return rows


def autocast_rows() -> list[Row]:
    """Returns bytes and memory of steps under autocast, beside models by hand."""
    tables = recorded("autocast")
    ways = {"float32": "float32", "autocast, O1": "O1", "autocast, O3": "O3"}
    of_devices = {
        device: tables[f"Whole steps, compiled for {device}"] for device in DEVICES
    }
    rows = []
    for model in dict.fromkeys(row["model"] for row in of_devices["V100"]):
        for way, name in ways.items():
            row = {"model": model, "precision": name}
            for device, table in of_devices.items():
                found = one(table, model=model, way=way)
                by_hand = one(table, model=model, way="by hand")
                assert found is not None
                assert by_hand is not None
                for column, title in (("MB", "bytes"), ("temporary MB", "memory")):
                    ratio = int(found[column]) / int(by_hand[column])
                    row[f"{device}: {title}"] = f"{ratio:.2f}"
            rows.append(row)
    return rows


def model_rows() -> list[Row]:
    """Returns how well real models train in each precision, the mean over seeds."""
    runs = load(list(TASKS))
    arms = ["float32", "bfloat16", "float16 without a loss scale", "float16", "O2"]
    rows = []
    for name, task in TASKS.items():
        table = rows_of(task, [run for run in runs if run["task"] == name])
        cells = {row["arm"]: row[task.label].split()[0] for row in table}
        title = {"task": f"{NAMES.get(name, name.upper())}: {task.label}"}
        rows.append(title | {arm: cells[arm] for arm in arms})
    return rows


SECTIONS = {"cost": cost_rows, "autocast": autocast_rows, "models": model_rows}


def with_tables(page: str) -> str:
    """Returns the text of `README.md` with its tables made anew."""
    for name, make_rows in SECTIONS.items():
        command = ["benchmarks/summary.py", name]
        page = with_output(page, command, table_of(make_rows()))
    return page


def main() -> None:
    """Prints the tables, and writes them into `README.md` if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sections = ["all", *SECTIONS]
    parser.add_argument("section", nargs="?", choices=sections, default="all")
    parser.add_argument("--record", action="store_true", help="write them to README.md")
    arguments = parser.parse_args()
    for name in SECTIONS:
        if arguments.section in ("all", name):
            print(f"{table_of(SECTIONS[name]())}\n")
    if arguments.record:
        README.write_text(with_tables(README.read_text()))


if __name__ == "__main__":
    main()
