#!/usr/bin/env python3
"""The time of a training step with and without an attack on the control port.

  hostile_clients.py BUILD_DIR [--rounds 3] [--connections 10000] [--steps 1000] [--ranks 2] [--json FILE]

Trains a small GPT in turns, quiet and attacked. During an attacked run a second process spreads these connections over the
steps: silent, slow, half-open, random bytes, a length of 4 GiB, HTTP, no token, a wrong token, a replayed handshake, requests
without a handshake. Prints the median step of each run, and the ratio of the medians over all rounds. The attacker runs at the
lowest priority, because real attackers use their own processors; the server's work is in the ratio. Exit code 0, or 1 if a run
fails, a stranger gets in, fewer than nine tenths of the connections were made, or the losses of two runs differ.
"""
import argparse, contextlib, hashlib, hmac, json, os, random, socket, statistics, struct, subprocess, sys, tempfile, threading, time

from common import end_on_sigterm, kill_group, metrics

MAGIC = b"tessera-store-4"
WARMUP = 10  # steps that do not count
OPEN = 100   # connections that the attacker keeps open


def message(kind, *fields):
    """A frame as comm/control/socket.h describes it."""
    body = kind + b"".join(struct.pack("<I", len(field)) + field for field in fields)
    return struct.pack("<I", len(body)) + body


def receive(connection):
    """The kind and the fields of the next message; (b"", []) if there is none."""
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
    """As comm/control/authentication.cpp makes it: of the frame, its length included."""
    return hmac.new(token, message(b"P", MAGIC, b"client", run_id, nonce, challenge), hashlib.sha256).digest()


class Door:
    """The control port of a run, as its first rank was told of it."""

    def __init__(self, launcher, deadline=60.0):
        end = time.monotonic() + deadline
        while True:
            try:
                child = open(f"/proc/{launcher}/task/{launcher}/children").read().split()[0]
                env = dict(v.split(b"=", 1) for v in open(f"/proc/{child}/environ", "rb").read().split(b"\0") if b"=" in v)
                host, port = env[b"TESSERA_RENDEZVOUS"].decode().rsplit(":", 1)
                break
            except (OSError, IndexError, KeyError):  # not started yet, or not yet the program
                if time.monotonic() > end:
                    sys.exit("the run did not start its ranks")
                time.sleep(0.01)
        self.address, self.run_id, self.token = (host, int(port)), env[b"TESSERA_RUN_ID"], env[b"TESSERA_TOKEN"]

    def connect(self):
        return socket.create_connection(self.address, timeout=5)

    def handshake(self, token):
        """What the client said, and how the server answered its proof."""
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
    """Makes connections, evenly spread over `seconds`, until the run ends."""

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
            self.problem = "the store refused the run's own token, so this script does not speak its protocol"
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
            with contextlib.suppress(OSError, SystemExit):  # turned away without an answer
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
        # Some send more: a replayed proof, or a guess.
        self._send(chance.choice(self.open), chance.choice([said[1], noise[:40]]))
        if len(self.open) > OPEN:
            self._leave(self.open.pop(0))

    @staticmethod
    def _send(connection, data):
        try:
            connection.send(data)
        except OSError:  # closed by the server, as it should be
            pass

    def _leave(self, connection):
        connection.setblocking(False)
        try:
            answer = connection.recv(4096)
            while len(answer) > 4:  # a challenge may come before the answer to the proof
                self.joined += answer[4:5] == b"y"
                answer = answer[4 + struct.unpack("<I", answer[:4])[0]:]
        except OSError:
            pass
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def train(o, text, folder, attack_for=None):
    """Losses and milliseconds of the steps of one run; attacked for so many seconds."""
    out = tempfile.mkdtemp(dir=folder)
    command = [f"{o.build}/bin/tessera", "train", "--nproc", o.ranks, "--data.train", text, "--data.tokenizer", "chars",
               "--model.n_layer", 4, "--model.n_head", 4, "--model.n_embd", 128, "--model.seq_len", 64, "--train.global_batch", 12,
               "--train.steps", o.steps, "--train.eval_every", 0, "--train.eval_batches", 0, "--checkpoint.every", 0,
               "--train.device", "cpu", "--run.out", out]
    attacker = None
    with tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err,
                                   process_group=0)  # in our session, where priorities are compared
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
        sys.exit(attacker.problem or f"{attacker.joined} strangers were let in")
    if attacker and attacker.made < 0.9 * o.connections:
        sys.exit(f"the run ended after {attacker.made} of {o.connections} connections; take more steps")
    rows = [row for row in metrics(out) if "step_ms" in row]
    return [row["loss"] for row in rows], [row["step_ms"] for row in rows]


def main():
    end_on_sigterm()
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("build")
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--connections", type=int, default=10000)
    a.add_argument("--steps", type=int, default=1000)
    a.add_argument("--ranks", type=int, default=2)
    a.add_argument("--deadline", type=float, default=600, help="seconds of one run")
    a.add_argument("--json", help="write the figures there, too")
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
                    sys.exit(f"round {number + 1}: the {name} run has other losses than the first one")
                losses = found
                times[name].append(steps)
                print(f"round {number + 1}, {name:8s} median step {statistics.median(steps[WARMUP:]):7.2f} ms", flush=True)
    medians = {name: statistics.median([ms for steps in of for ms in steps[WARMUP:]]) for name, of in times.items()}
    ratio = medians["attacked"] / medians["quiet"]
    print(f"all rounds: quiet {medians['quiet']:.2f} ms, attacked {medians['attacked']:.2f} ms, ratio {ratio:.3f}; losses equal, "
          f"no stranger got in")
    if o.json:
        with open(o.json, "w") as f:
            json.dump({"connections": o.connections, "medians_ms": medians, "ratio": ratio,
                       "runs_ms": {name: [statistics.median(s[WARMUP:]) for s in of] for name, of in times.items()}}, f, indent=2)


if __name__ == "__main__":
    main()
