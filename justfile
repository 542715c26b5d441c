# What people type: `just`, or read the commands here. https://just.systems

# the list of commands
default:
    @just --list

# style and types
check:
    ruff check .
    ruff format --check .
    mypy --no-error-summary

# the default tier of tests, or those of some modules: `just test tests/ops/test_scan_op.py`
test *arguments:
    python -m pytest {{arguments}}

# the tests of the structure, the pages and the door to the outside: seconds
structure:
    python -m pytest -n 0 -q tests/package/test_structure.py tests/package/test_compat.py tests/package/test_source_keys.py tests/package/test_site.py
    python -m pytest -n 0 -q tests/package/test_docs.py -k "links or map or rooms or reference"

# the documentation as a site, at http://127.0.0.1:8000
site:
    mkdocs serve

# all that a change has to pass, about forty minutes
ci:
    bash .ci/run
