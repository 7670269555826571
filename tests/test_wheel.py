"""`pip install .` and `pip install ./emulator`: what is in the archive and the wheels, and whom they refuse."""

import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import venv

import pytest
import torch
import yaml

import emulator
from kernel_fusion import steps
from kernel_fusion.checks.repository import ROOT, files, relative, run

# Ops, compiled ones, and two processes whose gradients are those of one.
USER = """
import os
import sys

import torch
import torch.distributed as dist

import step1_simple, step2_attention, step3_fused, step4_integration


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.ones(16)), torch.nn.Parameter(torch.zeros(16))

    def forward(self, x):
        return step1_simple.gelu(step3_fused.layer_norm(x, self.weight, self.bias))


def work(rank, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    alone, net = Net(), torch.nn.parallel.DistributedDataParallel(Net())
    alone(x).mean().backward()
    net(x[rank * 4 :][:4]).mean().backward()
    torch.testing.assert_close(net.module.weight.grad, alone.weight.grad)
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may still hold tensors, and abort a process whose Python is taken down


if __name__ == "__main__":
    x = torch.randn(4, 64)
    expected = torch.nn.functional.gelu(2 * x, approximate="tanh")
    compiled = torch.compile(lambda x: step1_simple.gelu(step1_simple.scale(x, 2.0, rung="v2_naive")), fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    q = torch.randn(1, 2, 16, 64)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    torch.testing.assert_close(step2_attention.attention(q, q, q), expected)
    assert "v1_naive" in step4_integration.rungs("embedding")
    torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=2)
    print(step1_simple.__file__)
"""


PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """What the source archive holds, which is made in a copy: setuptools writes beside its sources."""
    folder = tmp_path_factory.mktemp("archive")
    ignored = shutil.ignore_patterns("build", ".git", ".venv", "__pycache__", "*.egg-info", "out", "my")
    shutil.copytree(ROOT, folder / "tree", ignore=ignored)
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(folder), cwd=folder / "tree")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def test_the_source_archive_holds_all_that_a_build_reads(unpacked):
    wanted = [
        *files(".cpp", ".cu", ".h", "setup.py"),
        ROOT / "setup" / "backend.py",
        ROOT / "setup" / "dependencies.txt",
    ]
    wanted = [path for path in wanted if relative(path).startswith(("common/include", "emulator", "setup", "step"))]
    assert len(wanted) > 400
    assert [relative(path) for path in wanted if not (unpacked / relative(path)).is_file()] == []
    assert list(unpacked.glob("**/*.so")) == []


def test_the_wheel_has_the_steps_that_there_are():
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert [step for step in steps.STEPS if f'"{step.module}": "{step.folder}",' not in text] == []


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.13.1"])
def test_the_torch_of_the_wheel_is_taken(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy>=1", "torch==2.13.*"])
    steps.check_torch(version)


@pytest.mark.parametrize("version", ["2.1.3", "2.12.1+cu130", "2.130.0", "3.0.0"])
def test_another_torch_is_refused_by_name(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy>=1", "torch==2.13.*"])
    with pytest.raises(ImportError) as caught:
        steps.check_torch(version)
    assert f"built for torch 2.13, and this is torch {version}; pip install 'torch==2.13.*'" in str(caught.value)


@pytest.mark.long
def test_a_wheel_from_the_archive_works_where_the_tree_is_not(unpacked, tmp_path):
    """The emulation's objects are those of this tree's build: they do not depend on where they are linked."""
    built = max((ROOT / "build").glob("temp.*"), key=os.path.getmtime)
    settings = {"KF_CUDA": "0", "KF_EMULATED": str(built), "KF_HOST_FLAGS": "-O0", "MAX_JOBS": "2"}
    wheel = (*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(unpacked))
    run(*wheel, **settings)
    (path,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    run(*PIP, "install", "--no-deps", "--target", str(site), str(path))

    (metadata,) = site.glob("*.dist-info/METADATA")
    minor = ".".join(torch.__version__.split(".")[:2])
    needed = [line for line in metadata.read_text(encoding="utf-8").splitlines() if line.startswith("Requires-Dist")]
    assert needed == [f"Requires-Dist: torch=={minor}.*"]

    user = tmp_path / "user.py"
    user.write_text(USER)
    said = run(sys.executable, str(user), str(tmp_path / "meeting"), cwd=tmp_path, PYTHONPATH=str(site))
    assert str(site) in said

    text = metadata.read_text(encoding="utf-8")
    metadata.write_text(text.replace(f"torch=={minor}.*", "torch==1.0.*"), encoding="utf-8")
    command = [sys.executable, "-c", "import step2_attention"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    assert f"built for torch 1.0, and this is torch {torch.__version__}" in done.stderr


# ---- the emulator's ----


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder with an environment that has the emulator's wheel, rich and ninja, and nothing else."""
    folder = tmp_path_factory.mktemp("simt")
    shutil.copytree(ROOT / "emulator", folder / "emulator", ignore=shutil.ignore_patterns("__pycache__", "build"))
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(folder / "emulator"))
    (wheel,) = folder.glob(f"kernel_fusion_simt-{emulator.__version__}-*.whl")
    venv.create(folder / "venv", symlinks=True)
    (site,) = folder.glob("venv/lib/python*/site-packages")
    run(*PIP, "install", "--no-deps", "--target", str(site), str(wheel))
    for package in ("rich", "pygments", "markdown_it", "mdurl", "ninja"):
        there = pathlib.Path(importlib.util.find_spec(package).origin).parent
        (site / package).symlink_to(there)
    (folder / "venv" / "bin" / "ninja").symlink_to(shutil.which("ninja", path=pathlib.Path(sys.executable).parent))

    return folder


def simt(alone: pathlib.Path, *words: str) -> subprocess.CompletedProcess:
    """Runs the command that the wheel has installed, or with -c its Python."""
    (script,) = alone.glob("venv/lib/python*/site-packages/bin/simt")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KF_"))}
    environment["XDG_CACHE_HOME"] = str(alone / "cache")
    command = [alone / "venv" / "bin" / "python", *(words if words[0] == "-c" else (script, *words))]
    return subprocess.run(command, cwd=alone, env=environment, capture_output=True, text=True)


def test_the_emulators_wheel_holds_all_that_it_compiles(alone):
    (package,) = alone.glob("venv/lib/python*/site-packages/emulator")
    own = files(".py", ".cpp", ".h", ".css", ".js", under="emulator")
    wanted = [path.relative_to(ROOT / "emulator") for path in own if "tests" not in path.parts]
    assert len(wanted) > 90
    assert [str(path) for path in wanted if not (package / path).is_file()] == []
    done = simt(alone, "--help")
    assert done.stdout.startswith("usage: simt [OPTION…] FILE.cu")
    assert "  simt --race program.cu -- 100000\n" in done.stdout
    done = simt(alone, "-c", "from emulator import programs; print(programs.BUILD)")
    assert done.stdout.startswith(f"{alone / 'cache' / 'simt'}/")
    done = simt(alone, "missing.cu")
    assert (done.returncode, done.stderr) == (1, f"simt: no such file: {alone / 'missing.cu'}\n")


@pytest.mark.long
@pytest.mark.parametrize("mode", [[], ["--count"]], ids=["plain", "count"])
def test_a_strangers_program_runs_where_the_tree_is_not(alone, mode):
    shutil.copy(ROOT / "emulator" / "tests" / "programs" / "layer_norm.cu", alone)
    done = simt(alone, *mode, "layer_norm.cu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") >= 3
    (cache,) = (alone / "cache" / "simt").iterdir()
    assert [path.name for path in cache.iterdir()] == ["programs"]


def test_both_wheels_and_the_citation_have_one_version():
    for project in (ROOT, ROOT / "emulator"):
        text = (project / "pyproject.toml").read_text(encoding="utf-8")
        assert '\nversion = { attr = "emulator.__version__" }\n' in text
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == emulator.__version__
    assert {"cff-version", "message", "title", "authors"} <= set(cited)  # what the format demands
