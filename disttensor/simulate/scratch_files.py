"""Redirects the files that a program writes to a scratch folder, where its later reads find them.

A path that was written has a *copy* in the scratch folder, at the same path below it. Reads take
the copy if there is one. A path that was removed is hidden, with the paths below.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import shutil
import sqlite3
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_LINKS = 40  # that a path may lead through
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TEMPORARY = getattr(os, "O_TMPFILE", 0)  # it has the bits of a folder, too
# Functions of os whose first argument is a path that they read, or change in place.
_READS = ("access", "getxattr", "listxattr", "lstat", "readlink", "stat", "statvfs")
_CHANGES = ("chmod", "chown", "lchown", "removexattr", "setxattr", "truncate", "utime")
_OWN = (
    "open", "mkdir", "mkfifo", "remove", "rmdir", "rename", "link", "symlink", "listdir", "scandir",
    "chdir", "getcwd",
)  # fmt: skip
_os = {name: getattr(os, name) for name in dir(os) if callable(getattr(os, name))}
_open, _connect = io.open, sqlite3.connect


class ScratchFiles:
    """The files of this process, which ends with it: its copies are in ``folder``, and its
    temporary files beside.

    saved  the bytes of files whose tensors have no data, by path
    """

    def __init__(self, folder: str) -> None:
        self.folder = os.path.join(os.path.realpath(folder), "files")
        tempfile.tempdir = os.environ["TMPDIR"] = os.path.join(os.path.dirname(self.folder), "tmp")
        for made in (self.folder, tempfile.tempdir):
            os.mkdir(made)
        # devices, facts of processes, and temporary files are not redirected
        self._free = "/dev/", "/proc/", tempfile.tempdir + "/"
        self.saved: dict[str, int] = {}
        self._hidden: set[str] = set()
        self._open_before: dict[str, int] = {}
        self._here = os.getcwd()
        self._used = False  # something was written or removed
        self._own_open_files()

    def _own_open_files(self) -> None:
        """Opens files that were open before once more: positions belong to this process, and what
        is written goes to a copy."""
        for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
            fd, link = int(name), f"/proc/self/fd/{name}"
            if fd < 3 or not os.path.exists(link) or not stat.S_ISREG(os.stat(link).st_mode):
                continue
            with open(f"/proc/self/fdinfo/{fd}") as facts:
                flags = int(facts.read().partition("flags:")[2].split()[0], 8)
            path = os.readlink(link)
            writes, there = flags & os.O_ACCMODE != os.O_RDONLY, os.path.exists(path)
            if writes and there:
                path = self._copy(path)
                self._open_before[self._of_program(path)] = os.stat(path).st_size
            fresh = os.open(path if there else os.devnull, flags & (os.O_ACCMODE | os.O_APPEND))
            if there:
                os.lseek(fresh, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
            if there or writes:
                os.dup2(fresh, fd, os.get_inheritable(fd))
            os.close(fresh)

    # Paths ----------------------------------------------------------------------------------------

    def absolute(self, path: Any, dir_fd: int | None = None) -> str:
        """Returns the path that the program means, with links in its folders resolved."""
        name, at = os.fsdecode(path), self._here
        if dir_fd is not None:
            at = self._of_program(_os["readlink"](f"/proc/self/fd/{dir_fd}"))
        head, tail = os.path.split(os.path.normpath(os.path.join(at, name)))
        return self._of_program(os.path.join(self._resolved(head), tail))

    def _resolved(self, path: str, links: int = 0) -> str:
        """Returns the path without symbolic links."""
        at = "/"
        for part in path.split("/"):
            at = os.path.join(at, part)
            there = self.to_read(self._of_program(at))
            if _is_link(there) and links < _LINKS:
                to = os.path.join(os.path.dirname(at), _os["readlink"](there))
                at = self._resolved(os.path.normpath(to), links + 1)
        return at

    def _of_program(self, path: str) -> str:
        """Returns the path of which ``path`` is the copy, or ``path``."""
        return path[len(self.folder) :] or "/" if self._is_copy(path) else path

    def _is_copy(self, path: str) -> bool:
        return path == self.folder or path.startswith(self.folder + "/")

    def _is_free(self, path: str) -> bool:
        return path.startswith(self._free)

    def _is_hidden(self, path: str) -> bool:
        while path not in self._hidden:
            above = os.path.dirname(path)
            if above == path:
                return False
            path = above
        return True

    def to_read(self, path: str) -> str:
        """Returns the file behind an absolute path; a missing one if it was removed."""
        copy = self.folder + path
        if not self._used or self._is_free(path):
            return path
        return copy if _exists(copy) or self._is_hidden(path) else path

    def exists(self, path: str) -> bool:
        return _exists(self.to_read(path))

    def to_make(self, path: str) -> str:
        """Returns the copy of an absolute path, with folders around. Raises FileNotFoundError if
        the folder of the path does not exist."""
        if self._is_free(path):
            return path
        above = os.path.dirname(path)
        if not self.exists(above):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._used = True
        _makedirs(self.folder + above)
        return self.folder + path

    def _copy(self, path: str) -> str:
        """Returns the copy of an absolute path, which has the contents of the original."""
        there, copy = self.to_read(path), self.to_make(path)
        if there != copy and _exists(there):
            if stat.S_ISDIR(_os["stat"](there).st_mode):
                _makedirs(copy)
            else:
                with _open(there, "rb") as source, _open(copy, "wb") as target:
                    shutil.copyfileobj(source, target)
        return copy

    def _copy_all(self, path: str) -> str:
        copy = self._copy(path)
        if stat.S_ISDIR(_os["lstat"](copy).st_mode):
            for name in self.names(path):
                self._copy_all(os.path.join(path, name))
        return copy

    def names(self, path: str) -> list[str]:
        """Returns the names in a folder, of files and of copies."""
        copy, found = self.folder + path, dict[str, None]()
        if not self._is_hidden(path) and (_exists(path) or not _exists(copy)):
            found |= dict.fromkeys(_os["listdir"](path))
        if _exists(copy) or self._is_hidden(path):
            found |= dict.fromkeys(_os["listdir"](copy))
        return [name for name in found if self.exists(os.path.join(path, name))]

    def written(self) -> dict[str, int]:
        """Returns the bytes of each file that was written and still exists, by path."""
        out, folders = dict[str, int](), [self.folder]
        while folders:
            for entry in _os["scandir"](folders.pop()):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                path, nbytes = (
                    self._of_program(entry.path),
                    entry.stat(follow_symlinks=False).st_size,
                )
                if nbytes != self._open_before.get(path):
                    out[path] = self.saved.get(path, nbytes)
        return out

    # Calls ----------------------------------------------------------------------------------------

    def replace_calls(self) -> None:
        """Replaces the functions of Python that take paths, in all modules that have them, until
        the process ends."""
        calls = {name: self._redirect(name, self.to_read) for name in _READS if name in _os}
        calls |= {name: self._redirect(name, self._copy) for name in _CHANGES if name in _os}
        calls |= {name: getattr(self, f"_{name}") for name in _OWN}
        calls |= {"unlink": self._remove, "replace": self._rename}
        calls |= {"getcwdb": lambda: os.fsencode(self._here)}
        calls |= {"open()": self._open_file, "connect": self._connect}
        for names, name, real in places_of_calls(len(sys.modules)):
            names[name] = calls[real]
        for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            supported |= {calls[name] for name in calls if _os.get(name) in supported}

    def _redirect(self, name: str, to: Callable[[str], str]) -> Callable[..., Any]:
        real = _os[name]

        @functools.wraps(real)
        def call(path: Any = ".", *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            if isinstance(path, int) or (not self._used and to == self.to_read):
                return real(path, *args, **kwargs, **({} if dir_fd is None else {"dir_fd": dir_fd}))
            with self._named(path):
                return real(to(self.absolute(path, dir_fd)), *args, **kwargs)

        return call

    @contextmanager
    def _named(self, *paths: Any) -> Iterator[None]:
        """Names the program's paths in errors."""
        try:
            yield
        except OSError as error:
            if error.filename is not None:
                error.filename = paths[0]
            if error.filename2 is not None:
                error.filename2 = paths[-1]
            raise

    def _open_file(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not isinstance(file, int) and (self._used or set(mode) & set("wax+")):
            opener = kwargs.get("opener")
            if opener is not None:  # it opens the file, by os.open
                kwargs["opener"] = lambda _, flags: opener(file, flags)
                return _open(os.devnull, mode, *args, **kwargs)
            with self._named(file):
                return _open(self._opened(file, set(mode)), mode, *args, **kwargs)
        return _open(file, mode, *args, **kwargs)

    def _opened(self, file: Any, mode: set[str], dir_fd: int | None = None) -> str:
        """Returns the file to open. ``mode``: letters of open()."""
        path = self.absolute(file, dir_fd)
        if not mode & set("wax+"):
            return self.to_read(path)
        if _is_link(self.to_read(path)):  # to write to the file behind
            path = self._of_program(self._resolved(path))
        if "x" in mode and self.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if "r" in mode and not self.exists(path):
            return self.to_read(path)
        return self.to_make(path) if mode & set("wx") else self._copy(path)

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        letters = {"r"}
        if flags & _WRITES:
            letters = {"w"} if flags & os.O_TRUNC else {"a"} if flags & os.O_CREAT else {"r", "+"}
            letters |= {"x"} if flags & os.O_EXCL else set()
        with self._named(path):
            if _TEMPORARY and flags & _TEMPORARY == _TEMPORARY:
                at = self._copy(self.absolute(path, dir_fd))
            else:
                at = self._opened(path, letters, dir_fd)
            if flags & os.O_TRUNC and self.exists(self.absolute(path, dir_fd)):
                flags |= os.O_CREAT  # the copy may not exist yet
            return int(_os["open"](at, flags, mode))

    def _connect(self, database: Any, *args: Any, **kwargs: Any) -> Any:
        if database != ":memory:" and not kwargs.get("uri"):
            database = self._copy(self.absolute(database))
        return _connect(database, *args, **kwargs)

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        with self._named(path):
            full = self.absolute(path, dir_fd)
            if self.exists(full):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            _os["mkdir"](self.to_make(full), mode)

    def _mkfifo(self, path: Any, mode: int = 0o666, *, dir_fd: int | None = None) -> None:
        _os["mkfifo"](self.to_make(self.absolute(path, dir_fd)), mode)

    def _remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._take_away(path, dir_fd, "remove")

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        with self._named(path):
            full = self.absolute(path, dir_fd)
            if self.exists(full) and self.names(full):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
            self._take_away(path, dir_fd, "rmdir")

    def _take_away(self, path: Any, dir_fd: int | None, name: str) -> None:
        with self._named(path):
            full = self.absolute(path, dir_fd)
            there, copy = self.to_read(full), self.folder + full
            if there == copy or self._is_free(full) or not _exists(there):
                _os[name](there)
            elif stat.S_ISDIR(_os["lstat"](there).st_mode) != (name == "rmdir"):
                number = errno.ENOTDIR if name == "rmdir" else errno.EISDIR
                raise OSError(number, os.strerror(number), path)
            self._hidden.add(full)
            self._used = True

    def _rename(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        with self._named(src, dst):
            a, b = self.absolute(src, src_dir_fd), self.absolute(dst, dst_dir_fd)
            if not self.exists(a):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), src, None, dst)
            made = self._copy_all(a)
            _os["rename"](made, self.to_make(b))
            self._hidden |= {a, b}

    def _link(self, src: Any, dst: Any, **how: Any) -> None:
        with self._named(src, dst):
            _os["link"](self._copy(self.absolute(src)), self.to_make(self.absolute(dst)))

    def _symlink(self, src: Any, dst: Any, *_: Any, dir_fd: int | None = None, **__: Any) -> None:
        with self._named(src, dst):
            full = self.absolute(dst, dir_fd)
            if self.exists(full):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), src, None, dst)
            _os["symlink"](src, self.to_make(full))

    def _listdir(self, path: Any = ".") -> Any:
        if not self._used:
            return _os["listdir"](path)
        with self._named(path):
            names = self.names(self._folder_of(path))
        return list(map(os.fsencode, names)) if isinstance(path, bytes) else names

    def _scandir(self, path: Any = ".") -> Any:
        if not self._used:
            return _os["scandir"](path)
        folder = self._folder_of(path)
        return _Entries(_Entry(self, path, folder, name) for name in self._listdir(path))

    def _folder_of(self, path: Any) -> str:
        if isinstance(path, int):
            return self._of_program(_os["readlink"](f"/proc/self/fd/{path}"))
        return self.absolute("." if path is None else path)

    def _chdir(self, path: Any) -> None:
        with self._named(path):
            full = self._folder_of(path)
            _os["chdir"](self.to_read(full))
            self._here = full

    def _getcwd(self) -> str:
        return self._here


class _Entries(list["_Entry"]):
    """The result of ``os.scandir``."""

    def __enter__(self) -> Iterator[_Entry]:
        return iter(self)

    def __exit__(self, *_: object) -> None:
        pass

    def __next__(self) -> _Entry:
        if not self:
            raise StopIteration
        return self.pop(0)

    def close(self) -> None:
        self.clear()


class _Entry:
    """An ``os.DirEntry`` of a file or its copy."""

    def __init__(self, files: ScratchFiles, given: Any, folder: str, name: Any) -> None:
        self.name = name
        self.path = name if isinstance(given, int) else os.path.join(given or ".", name)
        self._at = files.to_read(os.path.join(folder, os.fsdecode(name)))

    def __fspath__(self) -> Any:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return _os["stat" if follow_symlinks else "lstat"](self._at)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._has(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._has(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._has(stat.S_ISLNK, False)

    def _has(self, kind: Callable[[int], bool], follow: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow).st_mode)
        except FileNotFoundError:
            return False


@functools.lru_cache(1)
def places_of_calls(_modules: int) -> list[tuple[dict[str, Any], str, str]]:
    """Returns the names in modules that are functions to replace: the module's dict, the name, and
    the function's own name. Call it before the fork: it reads all modules."""
    real = {id(_os[name]): name for name in (*_READS, *_CHANGES, *_OWN) if name in _os}
    real |= {id(_os[name]): name for name in ("unlink", "replace", "getcwdb")}
    real |= {id(_open): "open()", id(_connect): "connect"}
    own = {__name__, "posix"}  # ``posix`` has those of importlib
    modules = {id(m): m for name, m in list(sys.modules.items()) if name not in own}
    dicts = [
        names for m in modules.values() if isinstance(names := getattr(m, "__dict__", 0), dict)
    ]
    return [
        (names, name, real[id(value)])
        for names in dicts for name, value in list(names.items()) if id(value) in real
    ]  # fmt: skip


def _exists(path: str) -> bool:
    return _mode(path) != 0


def _is_link(path: str) -> bool:
    return stat.S_ISLNK(_mode(path))


def _mode(path: str) -> int:
    try:
        return int(_os["lstat"](path).st_mode)
    except (OSError, ValueError):
        return 0


def _makedirs(path: str) -> None:
    if not _exists(path):
        _makedirs(os.path.dirname(path))
        _os["mkdir"](path)
