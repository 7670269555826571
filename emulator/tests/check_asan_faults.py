"""Runs each fault of asan_faults.cu and checks that the sanitizer names its line."""

import re
import subprocess
import sys

program, source = sys.argv[1:3]
lines = {}
with open(source) as file:
    for number, text in enumerate(file, start=1):
        marked = re.search(r"// fault: (\w+)", text)
        if marked:
            lines[marked[1]] = number
lines["odd"] = lines["dynamic"]

clean = subprocess.run([program], capture_output=True, text=True)
failures = []
if clean.returncode != 0 or "finished" not in clean.stdout:
    failures.append(f"without a fault it ended with {clean.returncode}:\n{clean.stderr[:3000]}")
for fault, number in lines.items():
    run = subprocess.run([program, fault], capture_output=True, text=True)
    first_frame = re.search(r"#0 .*", run.stderr)
    if fault == "misaligned" and run.returncode != 0:
        first_frame = re.search(r".*runtime error: .*misaligned address.*", run.stderr)
    elif run.returncode == 0 or "AddressSanitizer" not in run.stderr:
        failures.append(f"{fault}: not found")
        continue
    if first_frame is None or f"asan_faults.cu:{number}" not in first_frame[0]:
        failures.append(f"{fault}: line {number} is not named by: {first_frame and first_frame[0]}")
    else:
        print(f"{fault}: asan_faults.cu:{number}")
print("\n".join(failures))
sys.exit(1 if failures else 0)
