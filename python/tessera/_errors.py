"""Exceptions of tessera."""

from __future__ import annotations


class Error(Exception):
    """Root of all errors that tessera raises.

    file: path of the file or directory that the error concerns; None if unknown
    tensor: name of the tensor that it concerns; None if it concerns none
    """

    def __init__(self, message: str, file: str | None = None, tensor: str | None = None):
        super().__init__(message)
        self.file = file
        self.tensor = tensor

    def __reduce__(self):
        return type(self), (self.args[0], self.file, self.tensor), self.__dict__


class InvalidArgument(Error, ValueError):
    """An argument or option is invalid, or a path holds no checkpoint."""


class Unsupported(Error):
    """A dtype, format or setting that tessera lacks."""


class Io(Error):
    """A file could not be read or written."""


class Corrupt(Error):
    """A file is malformed, incomplete, or fails its checksum.

    problems: all problems that verify() found, as Problem
    """

    problems: tuple = ()


class OutOfMemory(Error, MemoryError):
    """An allocation failed."""


class Communication(Error):
    """The exchange of messages between ranks failed."""


class Internal(Error):
    """A bug in tessera."""


_BY_STATUS = {1: InvalidArgument, 2: Unsupported, 3: Io, 4: Corrupt, 5: OutOfMemory, 7: Communication}


def make(status: int, message: str, file: str, tensor: str) -> Error:
    return _BY_STATUS.get(status, Internal)(message, file or None, tensor or None)
