"""For every test in the repository: which run, in how many processes, in which order of emulated threads."""

import collections
import gc
import inspect
import os
import re
import time
import zlib

import pytest
import torch

from kernel_fusion.checks import times

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
    parser.addoption("--times", action="store_true", help="of `make test`: judge the times that pages state of it")


# The tests of a step's file go to processes in so many bundles. xdist looks at all that a process has had whenever one
# ends, so that a bundle for each test would cost more and more.
BUNDLES = 64
# Files of steps whose tests look at what is run once for all of them: a lesson, a start of several workers, kills.
RUN_ONCE = ("test_lesson.py", "test_parallel.py", "test_resume.py")
# Two files of tests/ build and write in this repository.
IN_THE_REPOSITORY = {"tests/test_readme_commands.py", "tests/test_tour_output.py"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Where several processes run tests (pytest -n): which of them one process takes.

    Those that write in the repository stay together; so does each other file of tests/, emulator/ and common/, and
    some of the steps, since their tests share what they compile or run. Tests of the steps go in bundles. In the same
    one are those that differ in the rung alone, since each is compared with the one before; and an exercise's.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            if file in IN_THE_REPOSITORY:
                return "repository"
            if file.startswith(("tests/", "emulator/", "common/")) or file.endswith(RUN_ONCE):
                return file
            case = re.sub(r"-(cpu|v\d+_\w+)(?=[]-])", "", nodeid)
            case = re.sub(r"(?<=::test_exercises)(\[.*?)(-\d+)?: .*", r"\1", case)
            return f"{file} {zlib.crc32(case.encode()) % BUNDLES}"

    return Scheduling(config, log)


def pytest_configure(config):
    """Beside other processes torch takes its share of the cores, here and in what tests start, not all of them."""
    if count := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        torch.set_num_threads(max(1, torch.get_num_threads() // int(count)))
        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    elif config.getoption("--times") and not torch.cuda.is_available():
        config.pluginmanager.register(Times())


class Times:
    """Compares how long the tests took with what pages say, once all have run."""

    def __init__(self):
        self.by_file = collections.Counter()
        self.said = []

    def pytest_sessionstart(self):
        self.yardsticks = [times.yardstick()]
        self.began = time.monotonic()

    def pytest_runtest_logreport(self, report):
        self.by_file[report.nodeid.split("::")[0]] += report.duration

    def pytest_sessionfinish(self, session, exitstatus):
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        measured = times.of_tests(self.by_file)
        if os.cpu_count() == 2:  # what pages say of the whole is said of two cores
            measured["make test"] = time.monotonic() - self.began
        self.yardsticks.append(times.yardstick())
        self.said = [", ".join(f"{what} {spent:.0f} s" for what, spent in measured.items())]
        if reason := times.why_not(self.yardsticks):
            self.said += [f"{reason}; no stated time is judged"]
        elif found := times.problems(measured, self.yardsticks):
            self.said += found
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for line in self.said:
            terminalreporter.write_line(f"times: {line}")


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


def pytest_collection_finish():
    """All that is there by now stays: to look through it for garbage takes half a second each time."""
    gc.freeze()


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
