#!/usr/bin/env python3
"""Compares the time of a training step with and without an attack on the control port.

  hostile_clients.py BUILD_DIR [--rounds 3] [--connections 10000] [--steps 1000] [--ranks 2] [--json FILE]

Trains a small GPT alternately with and without attack. The attacker spreads these connections over the steps: silent, slow,
half-open, random bytes, a length of 4 GiB, HTTP, no token, a wrong token, a replayed handshake, requests without a handshake.
Prints the median step of each run, and the ratio of the medians over all rounds. The attacker runs at the lowest priority, since
real attackers use their own CPUs; the ratio includes the server's work. Exit code 0, or 1 if a run fails, an attacker joins,
fewer than nine tenths of the connections were made, or losses differ between runs.
"""
import contextlib, hashlib, hmac, json, os, random, socket, statistics, struct, subprocess, sys, tempfile, threading, time

from common import kill_group, metrics, small_keys, start_benchmark, train_command

MAGIC = b"tessera-store-4"
WARMUP = 10  # steps excluded from the medians
OPEN = 100   # connections that the attacker keeps open


def message(kind, *fields):
    """A frame: see comm/control/socket.h."""
    body = kind + b"".join(struct.pack("<I", len(field)) + field for field in fields)
    return struct.pack("<I", len(body)) + body


def receive(connection):
    """Kind and fields of the next message; (b"", []) at the end of the stream."""
    data = b""
    while len(data) < 4 or len(data) < 4 + struct.unpack("<I", data[:4])[0]:
        more = connection.recv(4096)
        if not more:
            return b"", []
        data += more
    body, fields = data[5:4 + struct.unpack("<I", data[:4])[0]], []
    while body:
        size = struct.unpack("<I", body[:4])[0]
        fields.append(body[4:4 + size])
        body = body[4 + size:]
    return data[4:5], fields


def proof(token, run_id, nonce, challenge):
    """HMAC of the frame, length included: see comm/control/authentication.cpp."""
    return hmac.new(token, message(b"P", MAGIC, b"client", run_id, nonce, challenge), hashlib.sha256).digest()


class Door:
    """The control port of a run, found in the environment of its first rank."""

    def __init__(self, launcher, deadline=60.0):
        end = time.monotonic() + deadline
        while True:
            try:
                child = open(f"/proc/{launcher}/task/{launcher}/children").read().split()[0]
                env = dict(v.split(b"=", 1) for v in open(f"/proc/{child}/environ", "rb").read().split(b"\0") if b"=" in v)
                host, port = env[b"TESSERA_RENDEZVOUS"].decode().rsplit(":", 1)
                break
            except (OSError, IndexError, KeyError):  # no child yet, or before its exec
                if time.monotonic() > end:
                    sys.exit("the run did not start its ranks")
                time.sleep(0.01)
        self.address, self.run_id, self.token = (host, int(port)), env[b"TESSERA_RUN_ID"], env[b"TESSERA_TOKEN"]

    def connect(self):
        return socket.create_connection(self.address, timeout=5)

    def handshake(self, token):
        """Returns (messages sent by the client, kind of the server's answer to the proof)"""
        with self.connect() as connection:
            nonce = os.urandom(32)
            said = [message(b"H", MAGIC, self.run_id, nonce)]
            connection.sendall(said[0])
            kind, fields = receive(connection)
            if kind != b"C":
                return said, kind
            said.append(message(b"P", proof(token, self.run_id, nonce, fields[0])))
            connection.sendall(said[1])
            return said, receive(connection)[0]


class Attacker(threading.Thread):
    """Opens connections, evenly spread over `seconds`, until the run ends."""

    def __init__(self, process, out, connections, seconds):
        super().__init__()
        self.process, self.out, self.connections, self.seconds = process, out, connections, seconds
        self.made, self.joined, self.problem, self.open = 0, 0, "", []

    def run(self):
        try:
            self._attack()
        except (OSError, SystemExit) as error:
            if self.process.poll() is None:
                self.problem = str(error)

    def _attack(self):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        door, chance = Door(self.process.pid), random.Random(1)
        said, answer = door.handshake(door.token)
        if answer != b"y":
            self.problem = "the store refused the run's own token: this script does not match its protocol"
            return
        while not os.path.exists(f"{self.out}/metrics.jsonl"):
            time.sleep(0.01)
        start = time.monotonic()
        while self.made < self.connections and self.process.poll() is None:
            due = self.connections * (time.monotonic() - start) / self.seconds
            if self.made >= due:
                time.sleep(0.002)
                continue
            self._one(door, said, chance)
        for connection in self.open:
            self._leave(connection)

    def _one(self, door, said, chance):
        self.made += 1
        kind = chance.randrange(10)
        if kind == 9:
            with contextlib.suppress(OSError, SystemExit):  # refused without an answer
                self.joined += door.handshake(b"a token that is none of this run's")[1] == b"y"
            return
        noise = chance.randbytes(chance.randrange(1, 4000))
        hello = message(b"H", MAGIC, door.run_id, b"")  # no token
        first = [b"", hello[:7], b"\xff" * 4 + noise, noise, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", said[0], said[0] + said[1],
                 hello, message(b"S", b"key", b"of a stranger")][kind]
        connection = door.connect()
        self._send(connection, first)
        if chance.randrange(10) == 0:
            with contextlib.suppress(OSError):  # closed by the server already
                connection.shutdown(socket.SHUT_WR)
        self.open.append(connection)
        # Send a replayed proof or garbage on any open connection.
        self._send(chance.choice(self.open), chance.choice([said[1], noise[:40]]))
        if len(self.open) > OPEN:
            self._leave(self.open.pop(0))

    @staticmethod
    def _send(connection, data):
        with contextlib.suppress(OSError):  # closed by the server, as expected
            connection.send(data)

    def _leave(self, connection):
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            answer = connection.recv(4096)
            while len(answer) > 4:  # a challenge may come before the answer to the proof
                self.joined += answer[4:5] == b"y"
                answer = answer[4 + struct.unpack("<I", answer[:4])[0]:]
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def train(o, text, folder, attack_for=None):
    """(losses, milliseconds) of the steps of one run. attack_for: seconds of attack, or None"""
    out = tempfile.mkdtemp(dir=folder)
    command = train_command(o.build, small_keys(text, o.steps, out), o.ranks)
    attacker = None
    with tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err,
                                   process_group=0)  # same session: priorities are compared within it
        try:
            if attack_for:
                attacker = Attacker(process, out, o.connections, attack_for)
                attacker.start()
            code = process.wait(timeout=o.deadline)
        finally:
            kill_group(process)
            process.wait()
            if attacker:
                attacker.join()
        if code != 0:
            err.seek(0)
            sys.exit(f"a run ended with {code}:\n{err.read()[-2000:]}")
    if attacker and (attacker.joined or attacker.problem):
        sys.exit(attacker.problem or f"{attacker.joined} attackers joined")
    if attacker and attacker.made < 0.9 * o.connections:
        sys.exit(f"the run ended after {attacker.made} of {o.connections} connections; use more --steps")
    rows = [row for row in metrics(out) if "step_ms" in row]
    return [row["loss"] for row in rows], [row["step_ms"] for row in rows]


def main():
    a = start_benchmark(__doc__, rounds=3, connections=10000, steps=1000, ranks=2)
    a.add_argument("--deadline", type=float, default=600, help="time limit of one run, seconds")
    a.add_argument("--json", help="also write the results to this file")
    o = a.parse_args()
    times, losses = {"quiet": [], "attacked": []}, None
    with tempfile.TemporaryDirectory() as folder:
        text, chance = f"{folder}/text.txt", random.Random(1)
        with open(text, "w") as f:
            f.write(" ".join(chance.choice("all and each gather is loss model of rank sum".split()) for _ in range(50000)))
        for number in range(o.rounds):
            for name in times:
                # Spread over the duration of the previous quiet run, short of its end.
                seconds = 0.9 * sum(times["quiet"][-1]) / 1e3 if name == "attacked" else None
                found, steps = train(o, text, folder, seconds)
                if found != (losses or found):
                    sys.exit(f"round {number + 1}: the losses of the {name} run differ from the first run")
                losses = found
                times[name].append(steps)
                print(f"round {number + 1}, {name:8s} median step {statistics.median(steps[WARMUP:]):7.2f} ms", flush=True)
    medians = {name: statistics.median([ms for steps in of for ms in steps[WARMUP:]]) for name, of in times.items()}
    ratio = medians["attacked"] / medians["quiet"]
    print(f"all rounds: quiet {medians['quiet']:.2f} ms, attacked {medians['attacked']:.2f} ms, ratio {ratio:.3f}; losses equal, "
          f"no attacker joined")
    if o.json:
        with open(o.json, "w") as f:
            json.dump({"connections": o.connections, "medians_ms": medians, "ratio": ratio,
                       "runs_ms": {name: [statistics.median(s[WARMUP:]) for s in of] for name, of in times.items()}}, f, indent=2)


if __name__ == "__main__":
    main()
