"""Arguments: tessera RUN CHAT_TEMPLATE. Drives `tessera generate` through standard input."""

import json
import signal
import subprocess
import sys

tessera, run, template = sys.argv[1:]
greedy = [tessera, "generate", run, "--temperature", "0"]


def output(arguments, text):
    return subprocess.run(
        greedy + arguments, input=text.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    ).stdout.decode()


def answer(arguments):
    return json.loads(output(arguments + ["--json"], ""))["text"]


assert output(["--prompt", "-"], "the ") == output(["--prompt", "the "], "")

# A conversation: each answer sees the messages before it.
chat = ["--chat-template", template, "--max-new-tokens", "7"]
first = answer(chat + ["--chat", "rank"])
messages = [{"role": r, "content": c} for r, c in [("user", "rank"), ("assistant", first), ("user", "sum")]]
with open(template + ".json", "w") as file:
    json.dump(messages, file)
second = answer(chat + ["--messages", template + ".json"])
assert output(chat + ["--interactive"], "rank\n\nsum\n") == f"{first}\n{second}\n"

# Ctrl-C ends an answer; the conversation goes on until its end.
process = subprocess.Popen(
    greedy + ["--chat-template", template, "--max-new-tokens", "100000000", "--interactive"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
)
for _ in range(2):
    process.stdin.write(b"rank\n")
    process.stdin.flush()
    assert process.stdout.read(500)
    process.send_signal(signal.SIGINT)
process.stdin.write(b"sum\n")
process.stdin.flush()
assert process.stdout.read(500)
process.terminate()
process.stdout.read()
assert process.wait() == 143, process.returncode
