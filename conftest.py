"""For every test in the repository: which run, in how many processes, in which order of emulated threads."""

import inspect
import os
import zlib

import pytest
import torch

# What tests call, and what asserts for them: pytest shows the values as in a test.
pytest.register_assert_rewrite("kernel_fusion.testing.exercise_contract", "kernel_fusion.testing.lesson_contract")


def pytest_addoption(parser):
    parser.addoption("--sample", type=int, metavar="N", help="run at most N tests of each file, evenly spaced")
    parser.addoption(
        "--schedules",
        type=lambda text: text.split(","),
        metavar="S,S…",
        help="orders of emulated threads, as KF_SIMT_SCHEDULE has them: each test of an emulated kernel draws one",
    )


# The tests of a step's file go to processes in so many bundles. xdist looks at all that a process has had whenever one
# ends, so that a bundle for each test would cost more and more.
BUNDLES = 64
# Two files of tests/ build and write in this repository.
IN_THE_REPOSITORY = {"tests/test_readme_commands.py", "tests/test_tour_output.py"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Where several processes run tests (pytest -n): which of them one process takes.

    Those that write in the repository stay together; so does each other file of tests/, emulator/ and common/, since
    its tests share what they compile. Tests of the steps go in bundles.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            if file in IN_THE_REPOSITORY:
                return "repository"
            if file.startswith(("tests/", "emulator/", "common/")):
                return file
            return f"{file} {zlib.crc32(nodeid.encode()) % BUNDLES}"

    return Scheduling(config, log)


def pytest_configure(config):
    """Beside other processes torch takes its share of the cores, here and in what tests start, not all of them."""
    if count := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        torch.set_num_threads(max(1, torch.get_num_threads() // int(count)))
        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())


def is_met(item, condition):
    """Whether a condition of kernel_fusion.testing.where holds for a test's parameters."""
    return condition(**{name: item.callspec.params[name] for name in inspect.signature(condition).parameters})


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    kept = [item for item in items if all(is_met(item, mark.args[0]) for mark in item.iter_markers("where"))]
    if count := config.getoption("--sample"):
        by_file = {}
        for item in kept:
            by_file.setdefault(item.path, []).append(item)
        kept = [item for tests in by_file.values() for item in tests[:: -(-len(tests) // count)]]
    left_out = set(items) - set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Sets the schedule that a test draws by its name: no turns, or a parameter would always meet the same one."""
    schedules = item.config.getoption("--schedules")
    if not schedules or not item.get_closest_marker("emulated"):
        return (yield)
    drawn = schedules[zlib.crc32(item.nodeid.encode()) % len(schedules)]
    item.add_report_section("call", "order of threads", f"KF_SIMT_SCHEDULE={drawn}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KF_SIMT_SCHEDULE", drawn)
        return (yield)
