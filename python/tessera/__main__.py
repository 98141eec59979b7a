"""The program tessera: python -m tessera."""

import os
import sys


def main() -> None:
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "tessera")
    os.execv(program, ["tessera", *sys.argv[1:]])


if __name__ == "__main__":
    main()
