"""setup/: what check_env.py says about machines good and bad, and which build of torch install.py takes."""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import types

import pytest

from kernel_fusion.checks.repository import ROOT, STEPS, relative, run


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "setup" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def check_env():
    return load("check_env")


@pytest.fixture
def install(monkeypatch, tmp_path):
    """install.py on a Linux machine without NVIDIA's things, whose network reaches torch's own index."""
    module = load("install")
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    monkeypatch.setattr(module.platform, "system", lambda: "Linux")
    monkeypatch.setattr(module.pathlib.Path, "exists", lambda path: False)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(module, "answers", lambda index: True)
    monkeypatch.setattr(module.compileall, "compile_dir", lambda *folder, **options: None)
    monkeypatch.setattr(module, "LOG", tmp_path / "build" / "setup.log")
    return module


def torch_for(cuda, version="2.13.0", gpus=(), archs=("sm_90",)):
    """A torch of that version and CUDA, which sees GPUs of the given capabilities."""
    properties = [types.SimpleNamespace(name="GPU", major=a, minor=b, total_memory=80 * 2**30) for a, b in gpus]
    calls = types.SimpleNamespace(
        is_available=lambda: bool(gpus),
        device_count=lambda: len(gpus),
        get_device_properties=properties.__getitem__,
        get_arch_list=lambda: list(archs),
    )
    return types.SimpleNamespace(__version__=version, version=types.SimpleNamespace(cuda=cuda), cuda=calls)


def test_this_machine_is_ready():
    said = run(sys.executable, "setup/check_env.py")
    assert re.search(r"^ok +Python", said, re.MULTILINE)
    assert re.search(r"^ok +torch", said, re.MULTILINE)
    assert said.rstrip().endswith("ready: make tour")


def test_something_to_fix_exits_1(check_env, monkeypatch, capsys):
    monkeypatch.setattr(check_env, "check_all", lambda: [check_env.Line("fix", "torch: absent", "install it")])
    assert check_env.main() == 1
    assert "fix   torch: absent\n      -> install it" in capsys.readouterr().out


OLD_COMPILER = "#!/bin/sh\ncase $1 in --version) echo g++ 7.5.0;; *) echo error: -std=c++20; exit 1;; esac\n"


def old_compiler(check_env, patch, folder):
    (folder / "old").write_text(OLD_COMPILER)
    (folder / "old").chmod(0o755)
    patch.setenv("CXX", str(folder / "old"))


@pytest.mark.parametrize(
    ("check", "plant", "said"),
    [
        ("python", lambda env, patch, _: patch.setattr(env.sys, "version_info", (3, 9, 1)), "install Python 3.10"),
        ("python", lambda env, patch, _: patch.setattr(env.sysconfig, "get_path", lambda name: "/none"), "python3-dev"),
        ("compiler", lambda env, patch, _: patch.setenv("CXX", "no-such-compiler"), "does not run"),
        ("compiler", old_compiler, r"g\+\+ 7\.5\.0.*-std=c\+\+20"),
        ("memory", lambda env, patch, _: patch.setattr(env, "memory_bytes", lambda: 2 * 2**30), "3 GiB are needed"),
        ("driver", lambda env, patch, _: patch.setattr(env, "output", lambda *_: (9, "it fails")), "it fails"),
    ],
    ids=["old Python", "no headers", "no compiler", "no C++20", "little memory", "a driver that fails"],
)
def test_what_is_missing_is_to_fix(check_env, monkeypatch, tmp_path, check, plant, said):
    plant(check_env, monkeypatch, tmp_path)
    line = getattr(check_env, f"check_{check}")()
    assert line.status == "fix"
    assert re.search(said, f"{line.what} {line.remedy}")


def test_absent_torch_is_to_fix(check_env, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    line = check_env.check_torch(*check_env.import_torch())
    assert (line.status, "dependencies.txt" in line.remedy) == ("fix", True)


@pytest.mark.parametrize(
    ("version", "status"), [("2.8.1", "fix"), ("2.9.0", "ok"), ("2.13.0+cpu", "ok"), ("3.0", "ok")]
)
def test_torch_version(check_env, version, status):
    assert check_env.check_torch(torch_for(None, version), "").status == status


@pytest.mark.parametrize("nvcc", ["/bin/nvcc", None])
@pytest.mark.parametrize(("cuda", "status"), [("13.0", "ok"), ("13.2", "ok"), ("12.8", "fix"), (None, "note")], ids=str)
def test_nvcc_is_compared_with_torch_and_needs_not_be_there(check_env, monkeypatch, cuda, status, nvcc):
    monkeypatch.setattr(check_env.shutil, "which", lambda name, path=None: nvcc)
    monkeypatch.setattr(check_env, "output", lambda *command: (0, "Cuda compilation tools, release 13.0, V1"))
    assert check_env.check_nvcc(torch_for(cuda)).status == (status if nvcc else "note")


@pytest.mark.parametrize(
    ("gpus", "status"),
    [([(9, 0)], ["ok"]), ([(6, 1)], ["fix"]), ([(10, 0)], ["fix"]), ([(9, 0), (9, 0)], ["ok", "ok"])],
)
def test_gpus_are_compared_with_torch(check_env, gpus, status):
    lines = check_env.check_gpus(torch_for("13.0", gpus=gpus), check_env.Line("ok", "driver"))
    assert [line.status for line in lines] == status


def test_driver_without_a_gpu_for_torch_is_to_fix(check_env):
    assert [line.status for line in check_env.check_gpus(torch_for("13.0"), check_env.Line("ok", "driver"))] == ["fix"]
    assert check_env.check_gpus(torch_for("13.0"), check_env.Line("note", "no driver")) == []


def test_without_nvidia_torch_is_the_cpu_build_if_its_index_answers(install, monkeypatch):
    assert install.torch_index() == install.CPU_INDEX
    monkeypatch.setattr(install, "answers", lambda index: False)
    assert install.torch_index() is None


@pytest.mark.parametrize("found", ["nvcc", "nvidia-smi"])
def test_with_nvidia_torch_is_the_registry_s(install, monkeypatch, found):
    monkeypatch.setattr(install.shutil, "which", lambda name: name if name == found else None)
    assert install.torch_index() is None


def test_named_index_wins(install, monkeypatch):
    monkeypatch.setenv("TORCH_INDEX", "https://example.org/whl")
    assert install.torch_index() == "https://example.org/whl"


def test_index_that_nobody_serves_does_not_answer():
    assert not load("install").answers("http://127.0.0.1:9/whl", seconds=1)


def test_torch_is_pinned_and_installed_first(install, monkeypatch):
    commands, compiled = [], []
    monkeypatch.setattr(install, "run", lambda what, command: commands.append(command) or 0)
    monkeypatch.setattr(install.compileall, "compile_dir", lambda folder, **options: compiled.append(folder))
    assert install.main() == 0
    assert compiled == [importlib.util.find_spec("torch").submodule_search_locations[0]]
    first, second = (command[command.index("install") + 1 :] for command in commands)
    assert first == ["--no-compile", install.torch_pin(), "--index-url", install.CPU_INDEX]
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+", install.torch_pin())
    assert second == ["--no-compile", "-r", "setup/dependencies.txt"]


def test_failed_installation_is_told_with_the_end_of_what_pip_said(install, monkeypatch, capfd):
    script = "print('Collecting'); print('ERROR: no such version'); raise SystemExit(3)"
    assert install.run("torch", [sys.executable, "-c", script]) == 3
    said = capfd.readouterr()
    assert re.fullmatch(r"setup: torch … failed, \d+ s\n", said.out)
    assert said.err.splitlines() == ["Collecting", "ERROR: no such version"]
    monkeypatch.setattr(install, "run", lambda what, command: 3)
    assert install.main() == 3
    assert "setup/environment.md" in capfd.readouterr().err


def test_an_installation_that_goes_well_says_only_that_it_is_at_work(install, monkeypatch, capfd):
    monkeypatch.setattr(install, "SILENT_S", 0.2)
    assert install.run("torch", [sys.executable, "-c", "import time; print('WARNING'); time.sleep(1)"]) == 0
    said = capfd.readouterr()
    assert re.fullmatch(r"setup: torch …( \d+ s …)+ ok, \d+ s\n", said.out)
    assert said.err == ""
    assert "WARNING" in install.LOG.read_text(encoding="utf-8")


def test_dependencies_end_with_the_package_itself():
    assert (ROOT / "setup" / "dependencies.txt").read_text(encoding="utf-8").split("\n")[-2:] == ["-e .", ""]


# ---- where nothing of ours is installed ----

SCRIPTS = [path for step in STEPS for path in sorted((ROOT / step).glob("*.py"))]
OURS = r"^(?:from|import) (?:kernel_fusion|emulator|step\d_\w+)\b.*"


@pytest.mark.parametrize("script", SCRIPTS, ids=relative)
def test_the_line_that_fails_says_what_to_do(script):
    """Python shows it: the first import of a package of ours."""
    lines = re.findall(OURS, script.read_text(encoding="utf-8"), re.MULTILINE)
    assert all("pip install -e .." in line for line in lines[:1])


@pytest.mark.parametrize(
    "script", ["step1-simple/setup.py", "step2-attention/benchmark.py", "step4-integration/train.py"]
)
def test_a_script_ends_with_that_line(script):
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}  # -S: without what was installed as -e
    command = [sys.executable, "-S", str(ROOT / script)]
    done = subprocess.run(command, cwd=ROOT / "docs", env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install -e .." in done.stderr
    assert re.search(r"ModuleNotFoundError: No module named '\w+'\n$", done.stderr)
