"""A build that is killed leaves nothing that Python would load or that a second build would trust."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from repository import ROOT, run

IGNORED = shutil.ignore_patterns("build", "__pycache__", "*.so", "*.egg-info")
BUILD = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
LOAD = "from kernel_fusion import stages; stages.on_path(); import step1_simple as s; print(s.rungs('scale'))"
WITHOUT_GPU = {"KF_CUDA": "0", "MAX_JOBS": "2"}


@pytest.mark.timeout(300)
def test_killed_build_is_not_trusted(tmp_path):
    for name in ("common", "step1-simple"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=IGNORED)
    stage = tmp_path / "step1-simple"
    build = subprocess.Popen(
        BUILD, cwd=stage, env={**os.environ, **WITHOUT_GPU}, start_new_session=True, stdout=subprocess.DEVNULL
    )
    while not (objects := list(stage.glob("build/**/*.o"))) and build.poll() is None:
        time.sleep(0.1)
    os.killpg(build.pid, signal.SIGKILL)
    build.wait()
    assert objects
    assert list(stage.glob("step1_simple/_C*")) == []

    load = subprocess.run(
        [sys.executable, "-c", LOAD], cwd=tmp_path / "common", env=os.environ, capture_output=True, text=True
    )
    assert "cd step1-simple && python setup.py build_ext --inplace" in load.stderr

    run(*BUILD, cwd=stage, **WITHOUT_GPU)
    assert "v2_naive" in run(sys.executable, "-c", LOAD, cwd=tmp_path / "common")

    (library,) = stage.glob("step1_simple/_C*")
    os.truncate(library, library.stat().st_size // 2)  # as where the kill comes while it is put into its place
    run(*BUILD, cwd=stage, **WITHOUT_GPU)
    assert "v2_naive" in run(sys.executable, "-c", LOAD, cwd=tmp_path / "common")
