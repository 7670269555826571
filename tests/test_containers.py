"""The containers' files, as far as they can be checked without a daemon: the linters need `make dev`."""

import json
import pathlib
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest
import yaml

from kernel_fusion.checks.repository import ROOT, run

SETUP = ROOT / "setup"
DOCKERFILES = [SETUP / "Dockerfile", SETUP / "Dockerfile.cpu"]
COMPOSE = SETUP / "docker-compose.yml"


class Instruction(NamedTuple):
    """A line of a Dockerfile, continued ones joined."""

    word: str
    rest: str


def instructions(path: pathlib.Path) -> list[Instruction]:
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", "")
    return [Instruction(*line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def all_of(path: pathlib.Path, word: str) -> list[str]:
    return [one.rest for one in instructions(path) if one.word == word]


def services() -> dict[str, dict]:
    return yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.name)
def dockerfile(request):
    return request.param


def test_the_base_is_pinned_by_version(dockerfile):
    (base,) = all_of(dockerfile, "FROM")
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+[\w.-]*", base)


def test_it_runs_as_somebody_whose_numbers_are_chosen(dockerfile):
    words = [one.word for one in instructions(dockerfile)]
    assert all_of(dockerfile, "USER") == ["reader"]
    assert {"USER_UID=1000", "USER_GID=1000"} == set(all_of(dockerfile, "ARG"))
    assert '--uid "$USER_UID"' in dockerfile.read_text(encoding="utf-8")
    assert words.index("USER") < words.index("COPY")  # so what is copied and installed is theirs
    assert all(copy.startswith("--chown=reader:reader ") for copy in all_of(dockerfile, "COPY"))


def test_what_it_copies_is_there_and_not_ignored(dockerfile):
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for copy in all_of(dockerfile, "COPY"):
        _, *sources, _ = copy.split()
        assert [source for source in sources if not (ROOT / source).exists() or source in ignored] == []


def test_its_commands_are_bash(dockerfile):
    for command in all_of(dockerfile, "RUN"):
        done = subprocess.run(["bash", "-n", "-c", command], stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_package_lists_are_removed_where_they_are_made(dockerfile):
    for command in all_of(dockerfile, "RUN"):
        if "apt-get" in command:
            assert re.search(r"apt-get update.*--no-install-recommends.*rm -rf /var/lib/apt/lists/\*", command)


def test_its_health_is_what_check_env_says(dockerfile):
    (health,) = all_of(dockerfile, "HEALTHCHECK")
    _, script = json.loads(health.partition("CMD ")[2])
    assert (ROOT / script).is_file()


def test_the_two_differ_in_their_base_alone():
    first, second = (path.read_text(encoding="utf-8").partition("\n\n")[2] for path in DOCKERFILES)
    assert first == second


def test_the_toolkit_is_of_torchs_cuda():
    page = (SETUP / "environment.md").read_text(encoding="utf-8")
    major = re.search(r"on PyPI that is one for CUDA (\d+)", page)[1]
    assert all_of(DOCKERFILES[0], "FROM")[0].startswith(f"nvidia/cuda:{major}.")


def test_what_a_build_leaves_is_not_sent_to_the_daemon():
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    made = {line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()}
    assert {".venv", "build", "*.so", "out", "__pycache__"} <= made
    assert {".git", ".venv", "**/build", "**/*.so", "out", "**/__pycache__"} <= set(ignored)


def test_services_stand_in_both_profiles_where_they_differ():
    found = {name: service["profiles"] for name, service in services().items()}
    assert found == {
        "dev": ["cpu"], "dev-gpu": ["gpu"], "jupyter": ["cpu"], "jupyter-gpu": ["gpu"], "tensorboard": ["cpu", "gpu"],
    }  # fmt: skip


@pytest.mark.parametrize("name", services())
def test_a_service_is_built_from_ours_and_opens_ports_to_this_machine_alone(name):
    service = services()[name]
    context = (SETUP / service["build"]["context"]).resolve()
    assert context == ROOT
    assert context / service["build"]["dockerfile"] in DOCKERFILES
    assert set(service["build"]["args"]) == {"USER_UID", "USER_GID"}
    assert service["build"]["dockerfile"].endswith(".cpu") != ("deploy" in service)
    assert [port for port in service.get("ports", []) if not port.startswith("127.0.0.1:")] == []
    assert ("ports" in service) == ("healthcheck" in service)
    assert service["volumes"] == [f"..:{all_of(DOCKERFILES[0], 'WORKDIR')[0]}"]
    if "command" in service:
        target = service["command"].split()[1]
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_an_editors_container_is_one_of_the_services():
    path = ROOT / ".devcontainer" / "devcontainer.json"
    editor = json.loads(path.read_text(encoding="utf-8"))
    assert (path.parent / editor["dockerComposeFile"]).resolve() == COMPOSE
    assert editor["service"] in services()
    assert [editor["workspaceFolder"]] == all_of(DOCKERFILES[0], "WORKDIR")
    assert [editor["remoteUser"]] == all_of(DOCKERFILES[0], "USER")


# ---- linters ----


@pytest.mark.tools
def test_hadolint_has_nothing_to_say(dockerfile):
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=pathlib.Path(sys.prefix, "bin"))
    if not hadolint:
        pytest.skip("no hadolint: make dev")
    assert run(hadolint, "--no-color", str(dockerfile)) == ""


@pytest.mark.tools
def test_compose_files_are_as_their_schema_wants_them():
    pytest.importorskip("check_jsonschema", reason="make dev")
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    assert "validation done" in run(*check, str(COMPOSE))
