"""Arguments: tessera RUN CHAT_TEMPLATE. Starts `tessera serve` and checks what its clients see."""

import atexit
import concurrent.futures
import gzip
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

tessera, run, template = sys.argv[1:]
CONTEXT = 48
PROMPT = "the rank "


def tessera_json(*arguments):
    return json.loads(subprocess.run([tessera, *arguments, "--json"], check=True, capture_output=True).stdout)


class Server:
    def __init__(self, *options, **environment):
        self.process = subprocess.Popen(
            [tessera, "serve", run, "--port", "0", "--name", "tiny", "--chat-template", template, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        atexit.register(self.process.kill)
        for line in self.process.stderr:
            if "serving" in line:
                self.line = line
                self.port = int(line.rsplit(":", 1)[1].split("/")[0])
                return
        raise RuntimeError("the server did not start")

    def request(self, method, path, body=None, headers={}, raw=False):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        text = body if isinstance(body, (str, bytes)) or body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response, data if raw else json.loads(data)

    def post(self, body, path="/v1/completions"):
        response, data = self.request("POST", path, body)
        assert response.status == 200, data
        return data

    def text(self, **fields):
        return self.post({"prompt": PROMPT, "temperature": 0, **fields})["choices"][0]["text"]

    def events(self, body, path="/v1/completions"):
        response, data = self.request("POST", path, {**body, "stream": True}, raw=True)
        assert response.getheader("Content-Type") == "text/event-stream"
        events = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    def files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def memory(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS:"))

    def end(self, number=signal.SIGTERM):
        started = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(timeout=20)
        assert code == 128 + number, code
        assert time.monotonic() - started < 3


def close(a, b):
    return abs(a - b) < 1e-4


server = Server("--max-requests", "8", "--batch", "4")

# Equal to the other commands.
models = server.request("GET", "/v1/models")[1]
assert [m["id"] for m in models["data"]] == ["tiny"]
assert server.request("GET", "/health")[0].status == 200
generate = ["generate", run, "--prompt", PROMPT, "--max-new-tokens", "24"]
greedy = tessera_json(*generate, "--temperature", "0")
whole = server.post({"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0})
assert whole["choices"][0]["text"] == greedy["text"]
assert whole["choices"][0]["finish_reason"] == "length"
assert whole["usage"] == {"prompt_tokens": len(PROMPT), "completion_tokens": 24, "total_tokens": 24 + len(PROMPT)}
assert server.text(prompt=greedy["prompt_tokens"], max_tokens=24) == greedy["text"]
samples = tessera_json(*generate, "--temperature", "0.9", "--top-p", "0.9", "--min-p", "0.02", "--seed", "5", "--samples", "3")
sampling = {"temperature": 0.9, "top_p": 0.9, "min_p": 0.02, "seed": 5, "n": 3, "max_tokens": 24}
several = server.post({"prompt": PROMPT, **sampling})["choices"]
assert [c["text"] for c in several] == [s["text"] for s in samples["samples"]]
assert [c["index"] for c in several] == [0, 1, 2]

# Several prompts, of one length and of others.
prompts = ["the rank ", "all and s", "to", [3, 4, 5]]
answers = server.post({"prompt": prompts, "max_tokens": 6, "temperature": 0, "echo": True})["choices"]
for prompt, answer in zip(prompts, answers):
    assert answer["text"] == server.text(prompt=prompt, max_tokens=6, echo=True)
assert answers[0]["text"].startswith(prompts[0])

# Stop strings, also within and across streamed tokens.
stop = greedy["text"][9:12]
cut = greedy["text"][: greedy["text"].index(stop)]
stopped = server.post({"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "stop": ["zz", stop], "logprobs": 0})["choices"][0]
assert (stopped["text"], stopped["finish_reason"]) == (cut, "stop")
assert "".join(stopped["logprobs"]["tokens"]) == cut
assert server.text(max_tokens=24, stop=stop) == cut
for more in ({}, {"stop": stop}, {"echo": True, "logprobs": 2}, {"n": 2}):
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, **more}
    events = server.events({**body, "stream_options": {"include_usage": True}})
    expected = server.post(body)
    assert events.pop()["usage"] == expected["usage"]
    for choice in expected["choices"]:
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        if choice["logprobs"]:
            for key, values in choice["logprobs"].items():
                assert [v for c in own for v in c["logprobs"][key]] == values, key

# Log-likelihoods, as lm-evaluation-harness asks for them.
document = "all and each gather is loss"
with open(template + ".txt", "w") as file:
    file.write(document)
evaluated = tessera_json("eval", run, "--documents", template + ".txt")
for length in (0, 1):
    scored = server.post({"prompt": [document, "to"], "max_tokens": length, "temperature": 0, "logprobs": 1, "echo": True})
    logprobs = scored["choices"][0]["logprobs"]
    tokens, values = logprobs["tokens"], logprobs["token_logprobs"]
    assert "".join(tokens) == scored["choices"][0]["text"] and len(tokens) == len(document) + length
    assert values[0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == list(range(len(tokens)))
    assert close(sum(values[1 : len(document)]), -evaluated["loss"] * evaluated["tokens"])
    for token, value, top in zip(tokens[1:], values[1:], logprobs["top_logprobs"][1:]):
        assert top[token] == value and max(top.values()) >= value and len(top) <= 2
    assert len(scored["choices"][1]["logprobs"]["tokens"]) == 2 + length
# Those of generated tokens are those of the same text as a prompt.
made = server.post({"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "logprobs": 3, "echo": True})["choices"][0]
again = server.post({"prompt": made["text"], "max_tokens": 0, "logprobs": 3, "echo": True})["choices"][0]["logprobs"]
for key in ("tokens", "text_offset"):
    assert made["logprobs"][key] == again[key]
assert all(close(a, b) for a, b in zip(made["logprobs"]["token_logprobs"][1:], again["token_logprobs"][1:]))
assert all(3 <= len(top) <= 4 for top in made["logprobs"]["top_logprobs"][1:] if top)

# Chat.
chat = {"messages": [{"role": "user", "content": "rank"}], "max_tokens": 7, "temperature": 0}
answer = tessera_json("generate", run, "--chat", "rank", "--chat-template", template, "--max-new-tokens", "7", "--temperature", "0")
reply = server.post(chat, "/v1/chat/completions")["choices"][0]
assert reply["message"] == {"role": "assistant", "content": answer["text"]}
parts = {**chat, "messages": [{"role": "user", "content": [{"type": "text", "text": "rank"}]}]}
assert server.post(parts, "/v1/chat/completions")["choices"][0] == reply
events = server.events({**chat, "logprobs": True, "top_logprobs": 2}, "/v1/chat/completions")
assert events[0]["choices"][0]["delta"]["role"] == "assistant"
assert "".join(e["choices"][0]["delta"]["content"] for e in events) == answer["text"]
content = [c for e in events for c in e["choices"][0]["logprobs"]["content"]]
assert "".join(c["token"] for c in content) == answer["text"] and len(content[0]["top_logprobs"]) == 2

# Bad requests: status, field at fault, part of the message.
good = {"prompt": "to"}
for body, status, param, message in [
    ("{", 400, None, "the request"),
    ("[]", 400, None, "must be a JSON object"),
    ('{"prompt": "to", "prompt": "to"}', 400, None, "prompt"),
    (b'{"prompt": "\xff"}', 400, None, "the request"),
    ("[" * 100000, 400, None, "the request"),
    (json.dumps({f"key{i}": 0 for i in range(100000)}), 400, None, "more than 1000 members"),
    ({**good, **{f"key{i}": 0 for i in range(999)}}, 200, None, None),
    ({**good, **{f"key{i}": 0 for i in range(1000)}}, 400, None, "more than 1000 members"),
    ({}, 400, "prompt", "missing"),
    ({"prompt": 5}, 400, "prompt", "out of range or wrong"),
    ({"prompt": ""}, 400, "prompt", "is empty"),
    ({"prompt": []}, 400, "prompt", "is empty"),
    ({"prompt": [[]]}, 400, "prompt", "is empty"),
    ({"prompt": [1, "a"]}, 400, "prompt", "must be a string, token ids"),
    ({"prompt": [1, 1e9]}, 400, "prompt", "must be a string, token ids"),
    ({"prompt": [1, 10**9]}, 400, "prompt", "1000000000 is not one of the model's token ids"),
    ({"prompt": [-1]}, 400, "prompt", "-1 is not one of"),
    ({"prompt": {"a": 1}}, 400, "prompt", "must be a string, token ids"),
    ({"prompt": "\u20ac"}, 400, None, "'prompt'"),
    ({"prompt": "to" * 30}, 400, "prompt", "context is 48 tokens, but the prompt has 60"),
    ({**good, "max_tokens": 48}, 400, "prompt", "has 2 and max_tokens is 48"),
    ({**good, "max_tokens": -1}, 400, "max_tokens", "between 0"),
    ({**good, "max_tokens": 1.5}, 400, "max_tokens", "must be an integer, got number"),
    ({**good, "max_tokens": 2**70}, 400, "max_tokens", "must be"),
    ({**good, "temperature": "hot"}, 400, "temperature", "must be a number, got string"),
    ({**good, "temperature": -1}, 400, None, "temperature must be 0 or more"),
    ({**good, "top_p": 0}, 400, None, "top-p"),
    ({**good, "min_p": 2}, 400, None, "min-p"),
    ({**good, "n": 0}, 400, "n", "between 1"),
    ({"prompt": ["to"] * 200, "n": 2}, 400, "prompt", "more than 256"),
    ({**good, "best_of": 2}, 400, "best_of", "not supported"),
    ({**good, "stop": [1]}, 400, "stop", "a string"),
    ({**good, "stop": ""}, 400, "stop", "empty string"),
    ({**good, "stream": 1}, 400, "stream", "true or false"),
    ({**good, "logprobs": 21}, 400, "logprobs", "between 0 and 20"),
    ({**good, "seed": 2**64}, 400, "seed", "must be"),
    ({**good, "frequency_penalty": 1}, 400, "frequency_penalty", "not supported"),
    ({**good, "model": "gpt-4"}, 404, "model", "'gpt-4' does not exist"),
    ({**good, "model": 4}, 400, "model", "a string"),
]:
    response, data = server.request("POST", "/v1/completions", body)
    case = (body if len(str(body)) < 99 else "...", response.status, data)
    assert response.status == status, case
    if status == 200:
        continue
    if message != "out of range or wrong":
        assert message in data["error"]["message"], case
    assert data["error"]["param"] == param and data["error"]["type"] == "invalid_request_error", case
for body, message in [
    ({}, "missing"),
    ({"messages": []}, "is empty"),
    ({"messages": "hi"}, "must be a list"),
    ({"messages": [{"content": "a"}]}, "role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type text"),
    ({**chat, "tools": [{}]}, "'tools' is not supported"),
]:
    response, data = server.request("POST", "/v1/chat/completions", body)
    assert response.status == 400 and message in data["error"]["message"], (body, data)
assert server.request("GET", "/v1/nothing")[0].status == 404
assert server.request("POST", "/v1/completions", "a=b", {"Content-Type": "text/plain"})[0].status == 415
for type_, status in (("Application/JSON ; charset=utf-8", 200), ("\tapplication/json", 200), ("application/jsonl", 415), ("", 415)):
    assert server.request("POST", "/v1/completions", good, {"Content-Type": type_})[0].status == status, type_

# Bodies that are too large or encoded, however they come.
large = b"x" * (17 << 20)


def chunked(body, path="/v1/completions"):
    chunks = (body[i : i + 65536] for i in range(0, len(body), 65536))
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", path, chunks, {"Content-Type": "application/json"}, encode_chunked=True)
    response = connection.getresponse()
    return response, json.loads(response.read())


for response, data in (server.request("POST", "/v1/completions", large), chunked(large)):
    assert response.status == 413 and "larger than" in data["error"]["message"], data
assert chunked(json.dumps(good).encode())[0].status == 200
assert chunked(large, "/v1/nothing")[0].status == 404
response, data = server.request("POST", "/v1/completions", gzip.compress(large), {"Content-Encoding": "gzip"})
assert response.status == 415 and "Content-Encoding" in data["error"]["message"], data

# Answers are not cut, and a refused body is not read as a request.
for method, path, body in (("GET", "/v1/models", None), ("POST", "/v1/completions", good)):
    response, data = server.request(method, path, body, {"Range": "bytes=1-4"})
    assert response.status == 200 and data["object"], data
inner = b"GET /health HTTP/1.1\r\n\r\n"
with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(inner), inner))
    received = b"".join(iter(lambda: raw.recv(65536), b""))
assert received.count(b"HTTP/1.1 ") == 1 and received.startswith(b"HTTP/1.1 415"), received
with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n\r\n")
    assert raw.recv(65536).startswith(b"HTTP/1.1 411")
for bytes_ in (b"\x00" * 100, b"GET\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n"):
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(bytes_)

# More requests than are admitted, on connections that are all open: each is served or refused, and the server's files and memory
# are given back.
CLIENTS = 200
long = {"prompt": ["to"] * 16, "n": 2, "max_tokens": 40, "temperature": 0}
files = server.files()
all_connected = threading.Barrier(CLIENTS)


def one(_):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.connect()
    all_connected.wait(timeout=30)
    connection.request("POST", "/v1/completions", json.dumps(long), {"Content-Type": "application/json"})
    response = connection.getresponse()
    data = json.loads(response.read())
    connection.close()
    return response.status, response.getheader("Retry-After"), data


def wait_for_files():
    deadline = time.monotonic() + 10
    while server.files() > files and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.files() <= files, (server.files(), files)


memory = []
for _ in range(2):
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        results = list(pool.map(one, range(CLIENTS)))
    served = [data for status, _, data in results if status == 200]
    refused = [data for status, after, data in results if (status, after) == (503, "1")]
    assert len(served) + len(refused) == CLIENTS and len(served) >= 8 and refused
    assert all(len(data["choices"]) == 32 and data["choices"] == served[0]["choices"] for data in served)
    assert all(data["error"]["type"] == "server_error" for data in refused)
    wait_for_files()
    memory.append(server.memory())
assert memory[1] < memory[0] + (16 << 20), memory

# Dropped connections end their requests, which would take seconds.
endless = {"prompt": ["to"] * 128, "n": 2, "max_tokens": 40, "temperature": 0, "logprobs": 20}
for stream in (False, True):
    for _ in range(6):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("POST", "/v1/completions", json.dumps({**endless, "stream": stream}), {"Content-Type": "application/json"})
        time.sleep(0.02)
        connection.close()
for _ in range(500):
    response, data = server.request("POST", "/v1/completions", {**good, "max_tokens": 1})
    if response.status == 200:
        break
    time.sleep(0.02)
assert response.status == 200
wait_for_files()

# A dropped request stops while it runs.
slow = Server("--batch", "1")
started = time.monotonic()
slow.post(endless)
full = time.monotonic() - started
for stream in (False, True):
    connection = http.client.HTTPConnection("127.0.0.1", slow.port, timeout=30)
    connection.request("POST", "/v1/completions", json.dumps({**endless, "stream": stream}), {"Content-Type": "application/json"})
    time.sleep(0.05)
    connection.close()
    started = time.monotonic()
    slow.post({**good, "max_tokens": 1})
    waited = time.monotonic() - started
    assert waited < full / 2, (stream, waited, full)
slow.end()

# A signal ends running requests and idle connections.
idle = http.client.HTTPConnection("127.0.0.1", server.port)
idle.request("GET", "/health")
assert idle.getresponse().read()
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    running = [pool.submit(server.request, "POST", "/v1/completions", {**endless, "stream": s}, {}, True) for s in (False, True)]
    time.sleep(0.1)
    server.end()
    response, data = running[0].result()
    assert response.status == 503 and b"stopping" in data, data
    response, data = running[1].result()
    assert response.status == 200 and b"stopping" in data, data

# A signal right after the start.
for _ in range(3):
    Server().end()

# IPv6, where the machine has it.
try:
    socket.create_server(("::1", 0), family=socket.AF_INET6).close()
except OSError:
    pass
else:
    server = Server("--host", "::1")
    assert "http://[::1]:" in server.line, server.line
    server.end()

# Keys.
for server, key in ((Server("--api-key", "secret"), "secret"), (Server(TESSERA_API_KEY="other"), "other")):
    for headers, status in (({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": key}, 401), ({"Authorization": f"Bearer {key}"}, 200)):
        assert server.request("GET", "/v1/models", headers=headers)[0].status == status
        response, data = server.request("POST", "/v1/completions", good, headers)
        assert response.status == status
        assert status == 200 or data["error"]["code"] == "invalid_api_key"
    assert server.request("GET", "/health")[0].status == 200
    server.end(signal.SIGINT)
