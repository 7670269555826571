# ---
# jupyter:
#   accelerator: GPU
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: accelerator
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %%
# ruff: noqa: E402  the first cell is for the reader

# %% [markdown]
# # From nothing to step 1 on a hosted GPU
#
# Fetch the project, set it up, look at the machine, build step 1, test and time its first kernels: with a GPU a
# quarter of an hour, most of it a download of 3 GB. The page setup/cloud.md says where, and what has been tried.
# Without a GPU the same cells run, emulated, and say what they leave out.
#
# Upload this file to Colab or Kaggle, choose a GPU (on Kaggle a T4, and switch Internet on), and write down here
# from where the project is to be cloned. In a clone of the project leave it empty.

# %%
REPOSITORY = ""  # such as https://…/kernel-fusion.git

# %%
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

here = pathlib.Path.cwd()
above = (folder for folder in (here, *here.parents) if (folder / "setup" / "check_env.py").is_file())
root = next(above, here / "kernel-fusion")


def run(*command, folder=root, **environment):
    """Runs a command, shows what it prints, and stops where it fails."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env={**os.environ, **environment}, **streams) as child:
        for line in child.stdout:
            print(line, end="")
    if child.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}; docs/faq.md lists errors")


if not root.exists():
    if not REPOSITORY:
        raise RuntimeError("write the project's address into REPOSITORY, one cell above")
    run("git", "clone", "--depth", "1", REPOSITORY, str(root), folder=here)
gpu = bool(shutil.which("nvidia-smi")) and subprocess.run(["nvidia-smi"], capture_output=True).returncode == 0
print("a GPU is there" if gpu else "there is no GPU: kernels will run emulated")

# %% [markdown]
# Set up: a `.venv` with a torch whose CUDA is that of the nvcc that is here. A Python that has all already is taken
# as it is. Colab's cannot make environments before `python3-venv` is installed.

# %%
if all(importlib.util.find_spec(name) for name in ("kernel_fusion", "torch")):
    python = sys.executable
    print("set up already")
else:
    python = str(root / ".venv" / "bin" / "python")
    if subprocess.run(["python3", "-c", "import ensurepip"], capture_output=True).returncode != 0:
        run("apt-get", "update", "-q")
        run("apt-get", "install", "-y", "-q", "python3-venv", "python3-dev")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout if nvcc else ""
    chosen = {"TORCH_INDEX": "https://download.pytorch.org/whl/cu126"} if "release 12." in said else {}
    run("make", "setup", **chosen)

# %% [markdown]
# What is here, a line a thing. After a `fix`, do what it says before you go on.

# %%
run(python, "setup/check_env.py")

# %% [markdown]
# Step 1's first build takes half a minute on two cores for the CPU, and some minutes with nvcc. The tests then
# compare its kernels with PyTorch in float64: on the GPU where there is one, and emulated.

# %%
step = root / "step1-simple"
run(python, "setup.py", "-q", "build_ext", "--inplace", folder=step)
run(python, "test.py", "-q", "-k", "v4_vector and scale", folder=step)

# %% [markdown]
# How fast is it? Only a GPU tells.

# %%
if gpu:
    run(python, "benchmark.py", "--op", "scale", "--sizes", "quick", folder=step)
else:
    print("left out: there is no GPU to time")

# %% [markdown]
# Next: step1-simple/README.md, and its walk, step1-simple/lesson.ipynb. A hosted machine forgets: keep what you
# write in a fork, or download it.
