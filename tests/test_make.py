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
    for name in ("setup/dependencies.txt", "setup/install.py", "pyproject.toml"):
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

    make.folder = folder
    return make


INSTALLED = ["python3 -m venv --clear .venv", "python setup/install.py"]
CHECKED = ["python setup/check_env.py"]


def test_make_alone_lists_every_target():
    listed = re.findall(r"^  make ([a-z-]+) ", run("make", "--no-print-directory"), re.MULTILINE)
    phony = (
        re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE).group(1).split()
    )
    assert sorted(listed) == sorted(phony)
    assert {"setup", "tour", "test", "bench", "lint", "gpu-check"} <= set(listed)


def test_setup_installs_once(house):
    assert house("setup") == (0, INSTALLED + CHECKED)
    assert house("setup") == (0, CHECKED)


def test_changed_dependencies_update_the_environment(house):
    house("setup")
    ready = house.folder / ".venv" / "ready"
    later = ready.stat().st_mtime + 10
    os.utime(house.folder / "setup" / "dependencies.txt", (later, later))
    assert house("setup") == (0, INSTALLED[1:] + CHECKED)


def test_interrupted_installation_starts_over(house):
    code, calls = house("setup", FAILS="setup/install.py")
    assert (code != 0, calls) == (True, INSTALLED)
    assert not (house.folder / ".venv" / "ready").exists()
    assert house("setup") == (0, INSTALLED + CHECKED)


def test_interrupted_update_starts_over(house):
    house("setup")
    ready = house.folder / ".venv" / "ready"
    later = ready.stat().st_mtime + 10
    os.utime(house.folder / "setup" / "dependencies.txt", (later, later))
    house("setup", FAILS="setup/install.py")
    assert house("setup") == (0, INSTALLED + CHECKED)


def test_given_python_is_used_as_it_is(house, tmp_path):
    own = tmp_path / "own"
    own.write_text(f'#!/bin/sh\necho "own $*" >> {tmp_path}/log\n')
    own.chmod(0o755)
    assert house("setup", PYTHON=str(own)) == (0, ["own setup/check_env.py"])
    assert not (house.folder / ".venv").exists()


@pytest.mark.parametrize("failing", ["setup.py", "-m"])
def test_a_command_that_fails_fails_the_target(house, tmp_path, failing):
    for step in ("step1-simple", "step2-attention", "step3-fused", "step4-integration"):
        (house.folder / step).mkdir()
    own = tmp_path / "own"
    own.write_text(f'#!/bin/sh\necho "own $*" >> {tmp_path}/log\ntest "$1" != "{failing}"\n')
    own.chmod(0o755)
    code, calls = house("test", PYTHON=str(own))
    assert (code != 0, len(calls)) == (True, 1 if failing == "setup.py" else 5)


def test_emulated_tests_run_in_several_orders():
    schedules = (
        re.search(r"^SCHEDULES := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        .group(1)
        .split(",")
    )
    assert {"forward", "reverse"} <= set(schedules)
    assert len([s for s in schedules if re.fullmatch(r"random:\d+", s)]) >= 2
