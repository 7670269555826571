"""`pip install .`: what goes into the source archive and the wheel, and whom the installed wheel refuses."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile

import pytest
import torch

from kernel_fusion import steps
from kernel_fusion.checks.repository import ROOT, files, relative, run

# Ops, compiled ones, and two processes whose gradients are those of one.
USER = """
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
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    settings = {"KF_CUDA": "0", "KF_EMULATED": str(built), "KF_HOST_FLAGS": "-O0", "MAX_JOBS": "2"}
    wheel = (*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(unpacked))
    run(*wheel, **settings)
    (path,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    run(*pip, "install", "--no-deps", "--target", str(site), str(path))

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
