"""Changes the package in one place after the other, and shows what no test notices.

    python tests/tools/mutation.py FOLDER [optax_lossscale/_scaling/rules.py ...]

It first runs the tests once, and records in FOLDER which of them reach which line. Then
it changes the named files, those of `_scaling` if none is named, one place at a time: a
comparison, an operation, a number, an argument, a condition, a call, a statement. For
each change it runs the tests that reach the line, and adds the result to
`FOLDER/results.jsonl`. A run that was stopped goes on where it was, also after the code
was edited; what had been noticed is not tried again. At last it prints each change that
no test notices and that `equivalent_mutants.md` does not explain, and fails if there is
one. A change takes a few seconds if a test notices it, and else about a minute.

It needs the extra `test`, and `coverage`. mutmut does not look at decorated functions,
and runs all tests that reach a function: the core would take days on two cores.

What a test module runs while it is imported is not seen to reach a line. So try an
unnoticed change by hand before you believe it.
"""

import argparse
import ast
import collections
import contextlib
import difflib
import glob
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
# The tests of each part of the package.
TESTS = {
    "_scaling": [
        "tests/scaling",
        "tests/other_systems",
        "tests/docs/test_api.py",
        "tests/integration/test_devices.py",
        "tests/integration/test_checkpoints.py",
        "optax_lossscale/_scaling",
        "optax_lossscale/_ground",
    ],
    "_autocast": ["tests/autocast", "optax_lossscale/_autocast"],
}
# Programs are mostly the same after a change, so each is compiled only once.
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": "jax_cache",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
PYTEST = [
    # All tests, with as few examples of property tests as in the fast command.
    *("-m", "not slow or slow"),
    *("-q", "-p", "no:cacheprovider"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # Of what is preloaded.
    *("-W", "ignore:Error reading persistent compilation cache"),
]
# Which tests a file has. They are run first, and the fastest of them before the others.
TESTS_OF = {
    "backward": ["scaled_backward", "first_mistakes"],
    "derivatives": [
        *("derivative_rules", "weight_gradients", "between_products", "weak_types"),
        *("transformations", "loops", "offloading", "devices"),
    ],
    "early_masks": ["masking", "cost", "optimizers", "transform"],
    "finite": ["finite", "cost", "devices", "kept_rounding", "verdicts"],
    "grad": ["grad", "grad_of_models", "first_mistakes"],
    "headroom": ["headroom", "all_histories", "bounds"],
    "loops": [
        *("loops", "transformations", "scopes", "between_products", "offloading"),
        *("closed_calls", "devices"),
    ],
    "masking": [
        *("masking", "where_applied", "optax_chains", "restored_states"),
        *("update_arguments", "transform"),
    ],
    "mistakes": [
        *("first_mistakes", "scaling_of_gradients", "transform"),
        *("restored_states", "update_arguments"),
    ],
    "rewrite": [
        *("which_products", "transformations", "levels", "unchanged"),
        *("calls", "between_products", "weak_types", "closed_calls"),
    ],
    "rules": [
        *("rules", "bounds", "all_histories"),
        *("presets", "long_runs", "recorded_trajectories"),
    ],
    "scale": ["scaling", "first_mistakes", "transform", "grad", "presets"],
    "state": ["state", "restored_states", "telemetry", "transfer_guard"],
    "telemetry": ["telemetry", "first_mistakes", "restored_states"],
    "trainable": [
        *("master_weights", "compact_masters", "grad_of_models"),
        *("first_mistakes", "transform"),
    ],
    "transform": [
        *("transform", "update_arguments", "optax_chains", "restored_states"),
        *("float8", "telemetry", "first_mistakes", "checkpoints", "optimizers"),
    ],
    "verdict": ["verdicts", "all_histories", "transform", "restored_states"],
}
SECONDS_FIRST = 3.0
FAST_TEST = 0.02
SECONDS_THEN = 60.0
# Then of other files, those with the most tests that reach the line.
OTHER_FILES = 8
SECONDS_OF_OTHERS = 25.0

COMPARISONS = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"},
    **{ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is"},
    **{ast.In: "not in", ast.NotIn: "in"},
}
OPERATIONS = {
    **{ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/"},
    **{ast.Mod: "*", ast.Pow: "*", ast.BitAnd: "|", ast.BitOr: "&", ast.BitXor: "|"},
    **{ast.LShift: ">>", ast.RShift: "<<"},
}
NAMES = {
    **{"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min"},
    **{"any": "all", "all": "any", "pmin": "pmax", "pmax": "pmin"},
    **{"zeros_like": "ones_like", "ones_like": "zeros_like", "zeros": "ones"},
    **{"logical_and": "logical_or", "logical_or": "logical_and"},
    **{"isfinite": "isnan", "float32": "float16", "startswith": "endswith"},
}
# Without these calls, or with their arguments swapped, code fails or is the same.
NO_USE = {
    *("map", "map_floating", "tree_map_with_path", "partial", "eval_shape", "jit"),
    *("isinstance", "getattr", "hasattr", "_replace"),
}
OF_TYPES_AND_TEXTS = ("warn", "cast", "TypeVar", "Error", "format")
SYMMETRIC = ("min", "max", "minimum", "maximum")


class Changes(ast.NodeVisitor):
    """Finds the changes of a source: where each starts and ends, and its new text."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[tuple[int, int, str]] = []
        self.visit(ast.parse(source))

    def span(self, node):
        def offset(row, column):
            line = self.source[self.starts[row - 1] : self.starts[row]]
            return self.starts[row - 1] + len(line.encode()[:column].decode())

        start = offset(node.lineno, node.col_offset)
        return start, offset(node.end_lineno, node.end_col_offset)

    def text(self, node):
        return self.source[slice(*self.span(node))]

    def change(self, node, new):
        self.found.append((*self.span(node), new))

    def between(self, left, right, new):
        """Changes the operator between two operands, which may be in parentheses."""
        start, end = self.span(left)[1], self.span(right)[0]
        gap = self.source[start:end]
        first = len(gap) - len(gap.lstrip(") \n"))
        last = len(gap.rstrip("( \n"))
        if first < last:
            self.found.append((start + first, start + last, new))

    def visit_all(self, nodes):
        for node in nodes:
            self.visit(node)

    def visit_Expr(self, node):
        if not isinstance(node.value, ast.Constant):  # A docstring.
            self.change(node, "pass")
            self.visit_all(ast.iter_child_nodes(node.value))

    def visit_Raise(self, node):
        self.change(node, "pass")  # Its text stays.

    def visit_arg(self, node):
        """Annotations stay."""

    def visit_JoinedStr(self, node):
        """Texts stay."""

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node):
        for decorator in node.decorator_list:
            if "jit" not in self.text(decorator):
                start, end = self.span(decorator)
                self.found.append((start - 1, end, ""))
                self.visit(decorator)
        self.visit_all(filter(None, [*node.args.defaults, *node.args.kw_defaults]))
        self.visit_all(node.body)

    def visit_ClassDef(self, node):
        self.visit_all(node.body)

    def visit_Assign(self, node):
        (target, *_) = node.targets
        names = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
        if isinstance(target, ast.Name) and target.id in names:
            self.change(node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node):
        self.change(node, "pass")
        self.visit(node.value)

    def visit_If(self, node):
        self.visit_condition(node.test)
        self.visit_all([*node.body, *node.orelse])

    def visit_condition(self, test):
        self.change(test, f"(({self.text(test)}) or True)")
        self.change(test, f"(({self.text(test)}) and False)")
        self.visit(test)

    def visit_IfExp(self, node):
        self.change(node, self.text(node.body))
        self.change(node, self.text(node.orelse))
        self.generic_visit(node)

    def visit_comprehension(self, node):
        for test in node.ifs:
            self.visit_condition(test)
        self.visit(node.iter)

    def visit_Compare(self, node):
        operands = [node.left, *node.comparators]
        for i, operator in enumerate(node.ops):
            self.between(operands[i], operands[i + 1], COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        word = " and " if isinstance(node.op, ast.And) else " or "
        for left_out in node.values:
            others = [self.text(v) for v in node.values if v is not left_out]
            self.change(node, f"({word.join(f'({other})' for other in others)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        self.change(node, f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node):
        if type(node.op) in OPERATIONS:
            self.between(node.left, node.right, OPERATIONS[type(node.op)])
        self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            self.change(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self.change(node, repr(node.value + 1))

    def visit_Name(self, node):
        if node.id in NAMES:
            self.change(node, NAMES[node.id])

    def visit_Attribute(self, node):
        if node.attr in NAMES:
            end = self.span(node)[1]
            self.found.append((end - len(node.attr), end, NAMES[node.attr]))
        self.visit(node.value)

    def visit_Call(self, node):
        function = self.text(node.func)
        if function.endswith(OF_TYPES_AND_TEXTS):
            return
        is_starred = any(isinstance(arg, ast.Starred) for arg in node.args)
        args = [] if function.rpartition(".")[2] in NO_USE or is_starred else node.args
        if args and not isinstance(args[0], ast.Constant):
            self.change(node, f"({self.text(args[0])})")
        if len(args) > 1 and not function.endswith(SYMMETRIC):
            (start, left), (right, end) = map(self.span, args[-2:])
            comma = self.source[left:right]
            swapped = self.text(args[-1]) + comma + self.text(args[-2])
            self.found.append((start, end, swapped))
        for keyword in node.keywords:
            if keyword.arg is not None:
                begin, stop = self.span(keyword)
                comma = re.match(r"\s*,?", self.source[stop:])
                self.found.append((begin, stop + comma.end(), ""))
        self.generic_visit(node)


def changes_of(name):
    """Yields the changes of a file that compile."""
    source = (ROOT / name).read_text()
    seen = collections.Counter()
    for start, end, new in Changes(source).found:
        changed = source[:start] + new + source[end:]
        if changed == source:
            continue
        try:
            compile(changed, name, "exec")
        except SyntaxError:
            continue
        first, last = source.rfind("\n", 0, start) + 1, source.find("\n", end)
        after = last + len(changed) - len(source)
        old = " ".join(source[first:last].split())
        new = " ".join(changed[first:after].split())
        seen[old, new] += 1
        line = source.count("\n", 0, start) + 1
        yield {
            "key": f"{name}: {old} -> {new} #{seen[old, new]}",
            "file": name,
            "line": line,
            "old": old,
            "new": new,
            "rows": range(line, line + source.count("\n", start, end) + 1),
            "changed": changed,
            "unchanged": source,
        }


def copy_project(folder):
    """Copies the files that git does not ignore."""
    list_files = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.check_output(list_files, cwd=ROOT, text=True).splitlines()
    shutil.rmtree(folder, ignore_errors=True)
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def in_child(folder, log, run, cpu_seconds=resource.RLIM_INFINITY):
    """Calls a function in a folder, in a process that has imported what tests do."""
    child = os.fork()
    if child:
        return child
    os.setpgid(0, 0)
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path.insert(0, str(folder))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, resource.RLIM_INFINITY))
    status = 3
    try:
        status = int(run())
    finally:
        sys.stdout.flush()
        os._exit(status)


class Reached:
    """A plugin that records which lines each test reaches, and how long it takes."""

    def __init__(self, folder, out):
        import coverage

        self.folder, self.out = folder, out
        package = str(folder / "optax_lossscale")
        self.coverage = coverage.Coverage(data_file=None, source=[package])
        self.seconds = collections.Counter()
        self.coverage.start()

    def pytest_runtest_setup(self, item):
        import jax

        jax.clear_caches()  # A program that is traced already would reach no line.
        self.coverage.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.seconds[report.nodeid] = float("inf")

    def pytest_sessionfinish(self):
        self.coverage.stop()
        data = self.coverage.get_data()
        lines = {
            os.path.relpath(path, self.folder): data.contexts_by_lineno(path)
            for path in data.measured_files()
        }
        self.out.write_text(json.dumps([lines, self.seconds]))


def baseline(folder, names, workers):
    """Runs all tests once; returns `{file: {line: tests}}` and `{test: seconds}`."""
    import pytest

    done = folder / "baseline.json"
    if not done.exists():
        paths = [path for name in names for path in sorted((ROOT / name).rglob("*.py"))]
        paths += [ROOT / name for name in names if name.endswith(".py")]
        files = [
            str(path.relative_to(ROOT))
            for path in paths
            if path.name.startswith("test_") or "tests" not in path.parts
        ]
        copies = [folder / f"copy{i}" for i in range(workers)]
        parts = [folder / f"part{i}.json" for i in range(workers)]
        children = []
        for i, (copy, part) in enumerate(zip(copies, parts, strict=True)):
            copy_project(copy)

            def run(i=i, copy=copy, part=part):
                plugins = [Reached(copy, part)]
                return pytest.main([*PYTEST, *files[i::workers]], plugins=plugins)

            children.append(in_child(copy, part.with_suffix(".log"), run))
        for child in children:
            os.waitpid(child, 0)
        lines, seconds = collections.defaultdict(dict), {}
        for part in parts:
            part_lines, part_seconds = json.loads(part.read_text())
            seconds |= part_seconds
            for name, tests_of_lines in part_lines.items():
                for line, tests in tests_of_lines.items():
                    lines[name].setdefault(line, []).extend(filter(None, tests))
        shutil.copytree(copies[0] / "optax_lossscale", folder / "optax_lossscale")
        done.write_text(json.dumps([lines, seconds]))
    lines, seconds = json.loads(done.read_text())
    failed = sum(value == float("inf") for value in seconds.values())
    print(f"{len(seconds)} tests, {failed} fail")
    return lines, seconds


def lines_before(before, now):
    """Maps the lines of a file to those that they were in the baseline."""
    texts = before.splitlines(), now.splitlines()
    matcher = difflib.SequenceMatcher(None, *texts, autojunk=False)
    return {
        block.b + i + 1: block.a + i + 1
        for block in matcher.get_matching_blocks()
        for i in range(block.size)
    }


def function_of(test):
    return test.partition("[")[0]


def files_of(tests):
    """Returns their files, those with the most tests first."""
    count = collections.Counter(test.partition("::")[0] for test in tests)
    return [name for name, _ in count.most_common()]


def within(limit, seconds, tests, files):
    """Returns the tests of these files that together take no longer than a limit."""
    chosen, used = [], 0.0
    for test in tests:
        if test.partition("::")[0] in files and used + seconds[test] < limit:
            chosen.append(test)
            used += seconds[test]
    return chosen


def tests_for(change, lines, seconds):
    """Returns the tests that run first, and those that run if these notice nothing."""
    reach = {test for row in change["rows"] for test in lines.get(str(row), ())}
    if not reach:  # Run at import only: whatever reaches the file, or reads its names.
        reach = set().union(*lines.values())
        reach |= {test for test in seconds if test.startswith("tests/docs/test_api")}
    reach = sorted((test for test in reach if test in seconds), key=seconds.get)
    stem = pathlib.Path(change["file"]).stem
    names = {f"test_{name}.py" for name in TESTS_OF.get(stem, [stem])}
    names.add("test_api.py")
    files = files_of(reach)
    own = [name for name in files if name.rpartition("/")[2] in names]
    one_each = {function_of(test): test for test in reversed(reach)}
    ordered = dict.fromkeys([*reversed(one_each.values()), *reach])
    first = within(SECONDS_FIRST, seconds, ordered, own)
    # The fastest of all, since they may compare what was made at import.
    own_tests = [test for test in seconds if test.partition("::")[0] in own]
    more = [test for test in own_tests if seconds[test] < FAST_TEST]
    more += [test for test in ordered if test not in first and test not in more]
    then = within(SECONDS_THEN, seconds, more, own)
    others = [name for name in files if name not in own][:OTHER_FILES]
    return first, then + within(SECONDS_OF_OTHERS, seconds, ordered, others)


class Chosen:
    """A plugin that runs these tests in this order, after those not in the baseline."""

    def __init__(self, tests, known):
        self.order = {test: i for i, test in enumerate(tests)}
        self.known = known

    def is_chosen(self, item):
        return item.nodeid in self.order or item.nodeid not in self.known

    def pytest_collection_modifyitems(self, items):
        items[:] = filter(self.is_chosen, items)
        items.sort(key=lambda item: self.order.get(item.nodeid, -1))


def start(change, tests, seconds, copy):
    """Starts the tests of a change in a copy of the project."""
    import pytest

    target = copy / change["file"]
    target.write_text(change["changed"])
    for compiled in target.parent.glob(f"__pycache__/{target.stem}.*"):
        compiled.unlink()

    def run():
        sys.dont_write_bytecode = True
        plugins = [Chosen(tests, seconds)]
        return pytest.main([*PYTEST, "-x", *files_of(tests)], plugins=plugins)

    limit = int(10 * sum(seconds[test] for test in tests)) + 120
    return in_child(copy, copy.with_suffix(".log"), run, limit)


def try_changes(folder, files, workers):
    """Tries what has not been tried."""
    parts = dict.fromkeys(pathlib.Path(name).parent.name for name in files)
    names = [test for part in parts for test in TESTS[part]]
    lines, seconds = baseline(folder, names, workers)
    results = folder / "results.jsonl"
    results.touch()
    tried = {json.loads(line)["key"] for line in results.read_text().splitlines()}
    todo = []
    for name in files:
        now = (ROOT / name).read_text()
        before = lines_before((folder / name).read_text(), now)
        for change in changes_of(name):
            change["rows"] = [before[row] for row in change["rows"] if row in before]
            if change["key"] not in tried:
                stages = tests_for(change, lines.get(name, {}), seconds)
                todo.append((change, list(filter(None, stages))))
    print(len(todo), "changes to try", flush=True)
    free = [folder / f"copy{i}" for i in range(workers)]
    for copy in free:
        copy_project(copy)

    def record(change, *, noticed):
        with results.open("a") as out:
            result = {key: change[key] for key in ("key", "file", "line", "old", "new")}
            print(json.dumps(result | {"noticed": noticed}), file=out)

    running = {}
    while todo or running:
        while free and todo:
            change, stages = todo.pop(0)
            if not stages:
                record(change, noticed=False)
                continue
            copy = free.pop()
            child = start(change, stages[0], seconds, copy)
            running[child] = change, copy, stages[1:]
        if not running:
            break
        child, status = os.wait()
        change, copy, stages = running.pop(child)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # What its tests may have started.
        if status == 0 and stages:  # Its slower tests run when all first ones have.
            todo.append((change, stages))
            print("{file}:{line}\n  - {old}\n  + {new}".format(**change), flush=True)
        else:
            record(change, noticed=status != 0)
        (copy / change["file"]).write_text(change["unchanged"])
        free.append(copy)


def report(folder, files):
    """Prints what no test noticed and is not explained; returns how many that are."""
    current = {change["key"] for name in files for change in changes_of(name)}
    lines = (folder / "results.jsonl").read_text().splitlines()
    results = {result["key"]: result for result in map(json.loads, lines)}
    results = [results[key] for key in current & results.keys()]
    explanations = (ROOT / "tests/tools/equivalent_mutants.md").read_text()
    missed = [result for result in results if not result["noticed"]]
    for result in missed:
        result["text"] = result["old" if result["new"] in ("", "pass") else "new"]
    open_ones = [r for r in missed if f"`{r['text']}`" not in explanations]
    for result in sorted(open_ones, key=lambda r: (r["file"], r["line"])):
        print("{file}:{line}\n  - {old}\n  + {new}".format(**result))
    print(
        f"{len(results)} of {len(current)} changes tried: {len(results) - len(missed)} "
        f"noticed, {len(missed) - len(open_ones)} explained, {len(open_ones)} open"
    )
    return len(open_ones)


def main() -> None:
    """Tries what has not been tried, and reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    core = sorted(glob.glob("optax_lossscale/_scaling/[a-z]*.py", root_dir=ROOT))
    files = arguments.files or core
    for key, value in CACHE.items():
        os.environ[key] = str(folder / value) if key.endswith("DIR") else value
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.argv = sys.argv[:1]
    # Nothing here may start JAX, since it must not be forked.
    import chex  # noqa: F401
    import equinox  # noqa: F401
    import flax.nnx
    import flax.training.train_state  # noqa: F401
    import hypothesis  # noqa: F401
    import optax  # noqa: F401
    import orbax.checkpoint  # noqa: F401

    try_changes(folder, files, arguments.workers)
    raise SystemExit(report(folder, files) > 0)


if __name__ == "__main__":
    main()
