"""Folders that no other user of the machine can enter, write to or replace.

Every local folder with content that this package trusts is created and verified here: the state of
a local Ray head, its token, and the code that workers import. A folder is private if

- it is a real directory, not a symbolic link, owned by this user, with mode 0700, and
- nobody else can rename or replace a directory on its path: each belongs to this user or to root,
  and is not writable by others unless it is sticky, like ``/tmp``. A directory named in
  ``VANE_DAGSTER_TRUST_PARENTS`` is exempt.

A folder that others could write to is refused, not repaired, because its content may be planted.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vane_dagster.errors import ComputeError

TRUST = "VANE_DAGSTER_TRUST_PARENTS"
"""The environment variable that names directories whose other users are trusted."""

MARK = "VANE_DAGSTER_HEAD"
"""The environment variable that names a local head's folder.

The head sets it, so every process that the head starts inherits it, including users' processes.
"""
_MODE = 0o700


def private_folder(path: str | Path, setting: str = "") -> Path:
    """Create a private folder, with missing parents, or verify an existing one.

    An existing folder that others can read, but not write to, gets mode 0700.
    """
    folder = Path(os.path.abspath(path))
    # Before anything is created: missing folders are created inside verified ones.
    with contextlib.suppress(FileNotFoundError):
        check_parents(folder, setting)
    _make(folder)
    is_private_folder(folder, setting)
    return folder


def is_private_folder(path: str | Path, setting: str = "") -> bool:
    """Return whether a folder exists; an existing one is verified as by `private_folder`."""
    folder = Path(os.path.abspath(path))
    try:
        status = folder.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    expected = f"a directory owned by user {os.geteuid()} with mode 0700, not a symbolic link"
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not own or status.st_mode & 0o022:
        raise ComputeError(_refusal(folder, status, expected, _fix("Remove it", setting)))
    check_parents(folder, setting)
    if stat.S_IMODE(status.st_mode) & 0o777 != _MODE:
        folder.chmod(_MODE)  # nobody else can replace it: its parents are verified
    return True


def check_parents(path: str | Path, setting: str = "") -> None:
    """Verify that nobody else can replace a directory or symbolic link on the way to a path.

    Directories named in ``VANE_DAGSTER_TRUST_PARENTS`` are not verified; symbolic links are.
    """
    given = Path(path).absolute()  # ".." after a symbolic link is followed, not shortened
    for ancestor in reversed(given.parents):
        status = _check_ancestor(given, ancestor, setting)
        if stat.S_ISLNK(status.st_mode):
            ancestor.stat()  # raises an error in a loop of links
            check_parents(ancestor.parent / os.readlink(ancestor) / "in it", setting)


def is_safe_to_import_from(path: str | Path) -> bool:
    """Return whether only this user and root can add modules to a folder or replace it."""
    folder = Path(path)
    try:
        status = folder.stat()
        check_parents(folder / "module.py")
    except (ComputeError, OSError):
        return False
    return status.st_uid in (0, os.geteuid()) and not _others_write(folder, status)


def check_private_file(path: str | Path, fix: str) -> None:
    """Verify that only this user can read and write a file."""
    file = Path(path)
    status = file.lstat()
    own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if not own or status.st_mode & 0o077:
        expected = f"a regular file owned by user {os.geteuid()} with mode 0600"
        raise ComputeError(_refusal(file, status, expected, fix))
    check_parents(file)


@contextlib.contextmanager
def temporary_folder(prefix: str = "vane-") -> Iterator[Path]:
    """Create a private folder for temporary files, and remove it at the end."""
    folder = new_temporary_folder(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_temporary_file(suffix: str) -> Any:
    """Create a file that only this user can read, open for writing; it is deleted when closed."""
    check_parents(temporary_root() / "vane", "TMPDIR")
    return tempfile.NamedTemporaryFile(suffix=suffix)


def new_temporary_folder(prefix: str, below: str | Path | None = None) -> Path:
    """Create a private folder with an unpredictable name; the caller removes it."""
    parent = temporary_root() if below is None else Path(below)
    check_parents(parent / prefix, "" if below is not None else "TMPDIR")
    return Path(os.path.abspath(tempfile.mkdtemp(prefix=prefix, dir=parent)))


def user_folder(kind: str) -> Path:
    """Return this user's private folder for one kind of temporary files."""
    return private_folder(temporary_root() / f"vane-{kind}-{os.geteuid()}", "TMPDIR")


def worker_folder(kind: str) -> Path:
    """Return a worker process's private folder for one kind of files, such as users' modules.

    It lies in the folder of the local Ray head; workers inherit the variable that names it.
    Elsewhere, such as in workers of `LocalCompute` and on cluster nodes, it is a per-user folder in
    the folder for temporary files. Ray's own session folder is not suitable, because all users can
    write there.
    """
    if head := os.environ.get(MARK):
        return private_folder(Path(head, kind))
    return user_folder(kind)


def temporary_root() -> Path:
    """Return the folder for temporary files: ``$TMPDIR``, else ``/tmp``."""
    return Path(tempfile.gettempdir())


def _make(folder: Path) -> None:
    """Create a folder and its missing parents with mode 0700, independent of the umask."""
    try:
        os.mkdir(folder, _MODE)
    except FileNotFoundError:
        _make(folder.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, _MODE)
    except FileExistsError:
        pass


def _check_ancestor(path: Path, ancestor: Path, setting: str) -> os.stat_result:
    status = ancestor.lstat()
    trusted = status.st_uid in (0, os.geteuid())
    if not stat.S_ISLNK(status.st_mode):
        sticky = bool(status.st_mode & stat.S_ISVTX)
        trusted = trusted and (sticky or not _others_write(ancestor, status))
        trusted = trusted or str(ancestor) in _trusted_parents()
    if not trusted:
        expected = (
            f"owned by user {os.geteuid()} or root and not writable by others unless sticky; "
            "as it is, another user can replace what is in it"
        )
        fix = _fix("Correct its owner or mode", setting)
        if stat.S_ISDIR(status.st_mode):
            fix += (
                f" In a container with a single user, set {TRUST}={ancestor} (several: separated "
                f"by {os.pathsep!r})."
            )
        raise ComputeError(_refusal(path, status, expected, fix, str(ancestor)))
    return status


def _trusted_parents() -> set[str]:
    given = os.environ.get(TRUST, "").split(os.pathsep)
    return {os.path.normpath(folder) for folder in given if os.path.isabs(folder)}


def _others_write(folder: Path, status: os.stat_result) -> bool:
    """Return whether users other than the owner and root may create or rename files here."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_own_group(folder, status.st_gid)


def _is_own_group(folder: Path, gid: int) -> bool:
    """Return whether a group has no other member, for example with per-user groups (umask 002)."""
    if gid == 0:  # containers assign it to users without a passwd entry
        return False
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    if gid != user.pw_gid or group.gr_name != user.pw_name:
        return False
    members = {one.pw_name for one in pwd.getpwall() if one.pw_gid == gid} | set(group.gr_mem)
    return members <= {user.pw_name} and not _has_acl(folder)


def _has_acl(folder: Path) -> bool:
    """Return whether an ACL exists; if so, the group bits hold the mask of all its entries."""
    try:
        return "system.posix_acl_access" in os.listxattr(folder)
    except (AttributeError, OSError):  # not supported by this system or file system
        return False


def _fix(fix: str, setting: str) -> str:
    return f"{fix}, or set {setting} to a folder of your own." if setting else f"{fix}."


def _refusal(path: Path, status: os.stat_result, expected: str, fix: str, above: str = "") -> str:
    return (
        f"{path} is not private: {above or 'it'} belongs to user {status.st_uid} with mode "
        f"{stat.filemode(status.st_mode)}, expected {expected}. {fix}"
    )
