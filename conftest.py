"""For every test in the repository: where the stages are, and the repository's own helpers for tests/."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent
for folder in (ROOT / "tests", ROOT / "common"):
    sys.path.insert(0, str(folder))

import pytest  # noqa: E402

from kernel_fusion import stages  # noqa: E402

stages.on_path()


def pytest_addoption(parser):
    parser.addoption("--sample", type=int, metavar="N", help="run at most N tests of each file, evenly spaced")


def pytest_itemcollected(item):
    """Says which tests one process takes, where several run (pytest-xdist, --dist=loadgroup).

    tests/ builds and writes in this repository, so all of it stays together; a file of common/ compiles what its tests
    share. Tests of the stages stand alone.
    """
    folder, *_, file = item.path.relative_to(ROOT).parts
    if folder in ("tests", "common"):
        item.add_marker(pytest.mark.xdist_group("repository" if folder == "tests" else file))


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    count = config.getoption("--sample")
    if not count:
        return
    by_file = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    kept = {item for tests in by_file.values() for item in tests[:: -(-len(tests) // count)]}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
