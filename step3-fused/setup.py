"""python setup.py build_ext --inplace

With nvcc and a CUDA build of torch this compiles the kernels for the GPU; always, it compiles them for the emulation.
KF_CUDA=0 leaves the GPU out; KF_CUDA=1 stops where it cannot be had.
"""

from glob import glob

from setuptools import setup

from kernel_fusion.build import Borrowed, StepExtension, build_ext  # not installed? pip install -e ..

# As step 2's setup.py has them: the objects of its rungs, which both steps link, are compiled by the same command.
STEP2 = ["../step2-attention", "../step2-attention/include", "../step1-simple/include"]

setup(
    name="step3_fused",
    packages=["step3_fused"],
    ext_modules=[
        StepExtension(
            "step3_fused._C",
            host=["fused_host.cpp", "pybind.cpp", *sorted(glob("host/*.cpp")), *sorted(glob("cpu/*.cpp"))],
            kernels=sorted(glob("kernels/*/*.cu")),  # compiled by nvcc, and for the emulation
            borrowed=[Borrowed(f"../step2-attention/kernels/{op}", STEP2) for op in ("linear", "attention")],
            include_dirs=[".", "include", "../step2-attention/kernels", *STEP2[1:]],
            cxx_flags=["-O3"],
            nvcc_flags=["-O3", "-lineinfo"],
        )
    ],
    cmdclass={"build_ext": build_ext},
)
