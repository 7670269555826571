"""What build.py decides before it compiles, and what it refuses."""

import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest
import setuptools
from setuptools.command.build_ext import build_ext as _build_ext

from kernel_fusion import build, steps
from kernel_fusion.console import child_environment


@pytest.fixture
def clean_environment(monkeypatch):
    for name in ("KF_CUDA", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "CXX", "KF_EMULATED", "KF_HOST_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def _fake_nvcc(folder: pathlib.Path, release: str = "13.0") -> str:
    path = folder / "nvcc"
    path.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        "--list-gpu-code) printf 'sm_75\\nsm_80\\nsm_86\\nsm_90\\nsm_100\\nsm_120\\n' ;;\n"
        f"--version) echo 'Cuda compilation tools, release {release}, V{release}.1' ;;\n"
        f"--dryrun) echo '#$ TOP={folder}/bin/..' >&2 ;;\n"
        "esac\n"
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("asked", "gpus", "chosen"),
    [
        ("8.0;9.0a+PTX", [], ("8.0", "9.0a+PTX")),
        ("8.0 9.0", [(7, 5)], ("8.0", "9.0a")),
        ("", [], ("7.5", "8.0", "8.6", "9.0a", "10.0", "12.0+PTX")),  # all that nvcc knows of the default list
        ("", [(9, 0), (8, 6)], ("8.6", "9.0a")),
    ],
)
def test_what_is_asked_for_or_a_visible_gpu_decides(clean_environment, tmp_path, asked, gpus, chosen):
    clean_environment.setenv("TORCH_CUDA_ARCH_LIST", asked)
    clean_environment.setattr("torch.cuda.is_available", lambda: bool(gpus))
    clean_environment.setattr("torch.cuda.device_count", lambda: len(gpus))
    clean_environment.setattr("torch.cuda.get_device_capability", gpus.__getitem__)
    assert build.architectures(_fake_nvcc(tmp_path)) == chosen


def test_an_architecture_that_nvcc_does_not_know_is_named(clean_environment, tmp_path):
    clean_environment.setenv("TORCH_CUDA_ARCH_LIST", "7.0 8.0")
    with pytest.raises(build.BuildError, match=r"TORCH_CUDA_ARCH_LIST: .* cannot compile for 7\.0; it knows"):
        build.architectures(_fake_nvcc(tmp_path))


def test_gencode_flags():
    assert build.gencode_flags(("8.0", "9.0a+PTX")) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    ]


def test_kf_cuda_0_leaves_the_gpu_out_and_1_fails_where_torch_has_no_cuda(clean_environment):
    clean_environment.setenv("KF_CUDA", "0")
    assert build.find_cuda() == (None, "KF_CUDA=0")
    clean_environment.setenv("KF_CUDA", "1")
    clean_environment.setattr("torch.version.cuda", None)
    with pytest.raises(build.BuildError, match="KF_CUDA=1, but torch .* is a build without CUDA"):
        build.find_cuda()


def test_nvcc_of_another_major_version_is_refused_with_both_named(clean_environment, tmp_path):
    _fake_nvcc(tmp_path, release="12.4")
    clean_environment.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    clean_environment.setattr("torch.version.cuda", "13.0")
    cuda, why_not = build.find_cuda()
    assert cuda is None
    assert "nvcc is of CUDA 12, torch of CUDA 13.0" in why_not


def test_cuda_home_comes_from_nvcc_itself(clean_environment, tmp_path):
    assert build.cuda_home(_fake_nvcc(tmp_path)) == tmp_path


@pytest.mark.parametrize(("variable", "value"), [("KF_CUDA", "yes"), ("MAX_JOBS", "0"), ("MAX_JOBS", "many")])
def test_settings_that_mean_nothing_are_named(clean_environment, variable, value):
    clean_environment.setenv(variable, value)
    with pytest.raises(build.BuildError, match=f"{variable} must be .*, got '{value}'"):
        build.find_cuda() if variable == "KF_CUDA" else build.parallel_jobs()


@pytest.fixture
def static_compiler(tmp_path):
    """A g++ that is set up for -static-libstdc++."""
    gxx = shutil.which("g++") or pytest.skip("needs g++")
    path = tmp_path / "static-g++"
    path.write_text(f'#!/bin/sh\nexec {gxx} -static-libstdc++ "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_compiler_is_looked_at_once(clean_environment, tmp_path):
    gxx = shutil.which("g++") or pytest.skip("needs g++")
    build.check_cxx(gxx, tmp_path)
    clean_environment.setattr(build, "links_shared", lambda cxx: pytest.fail("asked again"))
    build.check_cxx(gxx, tmp_path)


def test_a_static_cxx_library_is_refused_and_the_other_compiler_offered(static_compiler, clean_environment, tmp_path):
    offered = os.path.exists("/usr/bin/g++") and build.links_shared("/usr/bin/g++")
    way_out = "export CXX=/usr/bin/g\\+\\+$" if offered else "set CXX to one that does not$"
    for _ in range(2):  # a refusal is not remembered as a pass
        with pytest.raises(build.BuildError, match=f"links the C\\+\\+ standard library statically.*{way_out}"):
            build.check_cxx(static_compiler, tmp_path)
    links_shared = build.links_shared
    clean_environment.setattr(build, "links_shared", lambda cxx: cxx != "/usr/bin/g++" and links_shared(cxx))
    with pytest.raises(build.BuildError, match="set CXX to one that does not$"):
        build.check_cxx(static_compiler, tmp_path)


def test_a_compiler_that_is_missing_or_broken_is_named(tmp_path):
    with pytest.raises(build.BuildError, match="'no-such-g\\+\\+' is not on the PATH"):
        build.check_cxx("no-such-g++", tmp_path)
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho it does not work\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(build.BuildError, match="(?s)cannot make a shared library:.*it does not work"):
        build.check_cxx(str(broken), tmp_path)


def test_nothing_is_compiled_with_a_compiler_that_is_refused(static_compiler, tmp_path):
    step = tmp_path / "step1-simple"
    for name in ("common", "emulator", "step1-simple"):
        ignored = shutil.ignore_patterns("build", "__pycache__", "*.so", "*.egg-info", "tests", "results")
        shutil.copytree(steps.ROOT / name, tmp_path / name, ignore=ignored)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=step,
        env={**os.environ, "CXX": static_compiler, "KF_CUDA": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "links the C++ standard library statically" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.rglob("*.o")) == []


BUILDS = """\
import pathlib, subprocess, sys
from kernel_fusion import build
folder = pathlib.Path({folder!r})
with build.one_at_a_time(folder, "the " + sys.argv[1]) as holding:
    print("begun", flush=True)
    subprocess.run(["sh", "-c", "read line; echo " + sys.argv[1] + " >> built"], cwd=folder, **holding)
"""


@pytest.mark.parametrize("killed", [False, True], ids=["the other ends", "the other is killed"])
def test_of_two_that_build_in_a_folder_one_waits(tmp_path, killed):
    """Until the other's commands have ended, which may outlive it."""
    folder = tmp_path / "build"

    def begin(name: str) -> subprocess.Popen:
        command = [sys.executable, "-c", BUILDS.format(folder=str(folder)), name]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=child_environment(), text=True, **pipes)

    with begin("first") as first:
        assert first.stdout.readline() == "begun\n"
        with begin("second") as second:
            assert second.stderr.readline() == "waiting for another process that compiles the first …\n"
            if killed:
                first.send_signal(signal.SIGKILL)
                first.wait()
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(timeout=0.5)
            first.stdin.close()  # ends what it started
            assert second.stdout.readline() == "begun\n"
            assert (folder / "built").read_text() == "first\n"
            second.communicate("\n")
    assert (folder / "built").read_text() == "first\nsecond\n"


def test_a_step_is_built_by_one_process_at_a_time(clean_environment, tmp_path):
    """From the look at its rungs to the library's place."""
    step = build.StepExtension("some_step._C", host=[], kernels=[], include_dirs=[])
    command = build.build_ext(setuptools.Distribution({"ext_modules": [step]}))
    command.build_temp = str(tmp_path / "temp")
    command.ensure_finalized()
    held = []

    def builds(self) -> None:
        with (tmp_path / "temp" / "lock").open("w") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(self.holding["pass_fds"])

    clean_environment.setattr(_build_ext, "run", builds)
    command.run()
    assert len(held) == 1


def test_another_builds_objects_of_the_emulation_are_linked_and_not_compiled(clean_environment, tmp_path):
    step = build.StepExtension("some_step._C", host=["host.cpp"], kernels=["op/v1.cu"], include_dirs=[])
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    ours.mkdir()
    clean_environment.chdir(tmp_path)
    clean_environment.setenv("KF_EMULATED", str(theirs))
    with pytest.raises(build.BuildError, match=rf"KF_EMULATED: there is no {theirs}/runtime/.*; build the step there"):
        build.write_ninja(step, ours, tmp_path / "library.so", None)

    taken = [theirs / tmp_path.name / "emulated" / "op" / "v1.cu.o"]
    taken += [theirs / "runtime" / f"{source.name}.o" for source in (build.emulator.FOLDER / "src").glob("*.cpp")]
    for path in taken:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    lines = build.write_ninja(step, ours, tmp_path / "library.so", None).read_text(encoding="utf-8").splitlines()
    compiled = {line.split(": ")[0].removeprefix("build ") for line in lines if line.startswith("build ")}
    own = str(ours / tmp_path.name / "host/host.cpp.o")
    assert compiled == {own, str(tmp_path / "library.so")}
    (link,) = (line for line in lines if ": link " in line)
    assert set(link.split(": link ")[1].split()) == {own, *map(str, taken)}


def test_what_two_steps_share_is_compiled_by_one_command(clean_environment, tmp_path):
    """ninja runs a command again where it is not the one that made what is there."""
    lender, borrower, folder = tmp_path / "step1", tmp_path / "step2", tmp_path / "build"
    (lender / "kernels" / "op").mkdir(parents=True)
    borrower.mkdir()
    (lender / "kernels" / "op" / "v1.cu").touch()
    found = []
    for here, kernels, borrowed in (
        (lender, ["kernels/op/v1.cu"], []),
        (borrower, [], [build.Borrowed("../step1/kernels/op", ["../step1/include"])]),
    ):
        clean_environment.chdir(here)
        step = build.StepExtension(
            f"{here.name}._C", host=[], kernels=kernels, include_dirs=["include"], borrowed=borrowed
        )
        ninja_file = build.write_ninja(step, folder, here / "library.so", None)
        ninja = [str(pathlib.Path(sys.executable).with_name("ninja")), "-C", str(folder), "-f", str(ninja_file)]
        listed = subprocess.run([*ninja, "-t", "compdb"], capture_output=True, text=True, check=True).stdout
        found.append({command["output"]: command["command"] for command in json.loads(listed)})
    theirs, ours = found
    shared = theirs.keys() & ours.keys()
    assert str(folder / "step1" / "emulated" / "kernels" / "op" / "v1.cu.o") in shared
    assert len(shared) == len(theirs) - 1  # the library
    assert [theirs[output] for output in shared] == [ours[output] for output in shared]
