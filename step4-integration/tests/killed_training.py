"""A process that trains in children which end early, as test_resume.py asks for; prints what came of it as JSON.

It has no gradients computed before it forks, for then its children could not. What else they need is imported.
"""

import json
import os
import pathlib
import random
import resource
import shutil
import signal
import sys
import time
import traceback

import numpy as np
import torch
import train
from gpt2_model import GPT2, Config
from rich.console import Console
from training import checkpoint
from training.batches import Tokens
from training.data import Data
from training.optimizer import optimizer_of

STEPS, EVERY, KEEP = 12, 3, 2
CONFIG = Config(vocab_size=100, n_positions=8, n_embd=16, n_layer=1, n_head=2, initializer_range=0.1)
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}


def data():
    tokens = np.random.default_rng(0).integers(0, 100, 4000).astype(np.uint16)
    return Data(Tokens([tokens[:3000], tokens[3200:]], ["a", "b"]), Tokens([tokens[3000:3200]], ["c"]))


def in_a_child(work, answer):
    """Runs `work` in a child, which writes what it returns as JSON to `answer`. Returns the process's id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            text = json.dumps(work())
            answer.write_text(text)
            code = 0
        except OSError as error:
            answer.write_text(json.dumps({"error": str(error)}))
            code = 7
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def training(folder, steps=STEPS, **options):
    """Trains, or goes on. Returns the losses of its steps by number, exactly, and the last one on held-out data."""
    losses = {}
    options = {"steps": steps, "save_every": EVERY, "keep": KEEP, "resume": True, "rate": 1e-2, "batch": 4} | options

    def note(number, loss):
        losses[number] = loss.item().hex()

    result = train.train(
        Console(quiet=True), data=data(), config=CONFIG, out=folder, eval_every=5, on_loss=note, **options
    )
    return {"losses": losses, "held out": result.loss.hex()}


def killing_at(number, folder):
    """`training`, killed before it opens, renames or removes for the time `number`; returns how often it did."""
    count = 0

    def look(event, arguments):
        nonlocal count
        if event in EVENTS and (event != "open" or str(arguments[0]).startswith(str(folder))):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    training(folder)
    return count


def with_a_limit(folder, limit):
    """`training` where no file may become longer than `limit` bytes: as on a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return training(folder)


def state_of(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def main(work, scratch, every):
    """`every`: of the moments, each so many-th; or the seed of the random ones."""
    torch.set_num_threads(1)
    optimizer_of(GPT2(CONFIG), 1.0).step()  # imports torch._dynamo, which takes longer than a training here
    folder, answer = scratch / "out", scratch / "answer"

    def run(work, expected=0):
        code = ended(in_a_child(work, answer))
        assert code == expected, (code, answer.read_text() if answer.exists() else "")
        return json.loads(answer.read_text()) if code in (0, 7) else None

    whole = run(lambda: training(folder))
    found = {"whole": whole, "files": state_of(folder), "killed": [], "full": []}
    moments = 0
    if work == "moments":
        shutil.rmtree(folder)
        moments = run(lambda: killing_at(0, folder))
        for number in range(1 + every // 2, moments + 1, every):
            shutil.rmtree(folder)
            run(lambda number=number: killing_at(number, folder), -signal.SIGKILL)
            left = state_of(folder) if folder.exists() else []
            found["killed"].append({"left": left} | run(lambda: training(folder)) | {"files": state_of(folder)})
        for file in ("config.json", "model.safetensors", "training.safetensors"):
            shutil.rmtree(folder)
            run(lambda: killing_at(moments // 2, folder), -signal.SIGKILL)
            last = checkpoint.whole(folder)[-1]
            size = (last / file).stat().st_size
            failed = run(lambda size=size: with_a_limit(folder, size - 1), 7)
            case = {"last": str(last), "error": failed["error"], "left": state_of(folder)}
            found["full"].append(case | run(lambda: training(folder)) | {"files": state_of(folder)})
    else:
        draw = random.Random(every)
        for _ in range(20):
            shutil.rmtree(folder)
            killed = 0
            while killed < 50:
                pid = in_a_child(lambda: training(folder, steps=60, save_every=2), answer)
                time.sleep(draw.uniform(0.01, 0.4))
                os.kill(pid, signal.SIGKILL)
                if ended(pid) == 0:
                    break
                killed += 1
            if killed == 50:
                run(lambda: training(folder, steps=60, save_every=2))
            answered = json.loads(answer.read_text())
            found["killed"].append({"times": killed} | answered | {"files": state_of(folder)})
        shutil.rmtree(folder)
        found["whole"] = run(lambda: training(folder, steps=60, save_every=2))
        found["files"] = state_of(folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]))
