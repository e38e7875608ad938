"""The tensors that users store between rounds, in files of the run folder, which all nodes can read.

    users/000/417/round-000010-after-000003.safetensors    what user 417 stored in round 10 (from 0), after round 3

A state is a function of (seed, rounds before), so a file that is written again after a fault has the same bits. Files
after the round that training returns to are never read. Only users that took part have files.
"""

import re
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from flsim.base.errors import InputError
from flsim.base.files import make_folder, new_file
from flsim.training.update import Moments, by_slot, flat

NAME = re.compile(r"round-(\d{6,})-after-(\d{6,}|none)\.safetensors", re.ASCII)
FOLDER = "users"


class UserStates:
    """The states of users: in files of a folder, or, without one or if read-only, in memory, which takes precedence."""

    def __init__(self, folder: Path | None = None, is_read_only: bool = False) -> None:
        self._folder = folder
        self._memory: dict[int, dict[int, Moments]] | None = {} if folder is None or is_read_only else None

    def read(self, user: int, round_: int) -> Moments | None:
        """Return the tensors of a user's last round before a given round, or None; InputError if they were removed."""
        in_memory = {written for written in (self._memory or {}).get(user, {}) if written < round_}
        files = {written: path for written, (path, _) in self._files(user).items() if written < round_}
        if in_memory and max(in_memory) >= max(files, default=-1):
            return self._memory[user][max(in_memory)]  # type: ignore[index]
        if not files:
            first = min(self._files(user).items(), default=None)
            before = None if first is None else first[1][1]
            if before is not None and before < round_:
                raise InputError(
                    f"{self._folder_of(user)}: the state of user {user} before round {round_ + 1} was removed, "
                    "because training cannot return to this round; name a later round"
                )
            return None
        path = files[max(files)]
        try:
            return by_slot(load_file(path))
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: the file is damaged; train the run again from the beginning") from error

    def write(self, user: int, round_: int, user_state: Moments, oldest_resumable_round: int) -> None:
        """Store a user's state after a round, and remove states that no resumable round needs."""
        on_cpu = {
            slot: {name: value.float().cpu().contiguous() for name, value in tensors.items()}
            for slot, tensors in user_state.items()
        }
        if self._memory is not None:
            rounds = self._memory.setdefault(user, {})
            rounds[round_] = on_cpu
            for old in _superseded(list(rounds), oldest_resumable_round):
                del rounds[old]
            return
        files = self._files(user)
        before = max((written for written in files if written < round_), default=None)
        folder = self._folder_of(user)
        make_folder(folder)
        path = folder / f"round-{round_:06d}-after-{'none' if before is None else f'{before:06d}'}.safetensors"
        with new_file(path) as partial:
            save_file(flat(on_cpu), partial)
        for old in _superseded(list(files), oldest_resumable_round):
            files[old][0].unlink(missing_ok=True)

    def _folder_of(self, user: int) -> Path:
        return (self._folder or Path()) / f"{user // 1000:03d}" / str(user)

    def _files(self, user: int) -> dict[int, tuple[Path, int | None]]:
        """Return a user's files by round, each with the round of the user's file before it."""
        if self._folder is None or not (folder := self._folder_of(user)).is_dir():
            return {}
        named = [(path, NAME.fullmatch(path.name)) for path in folder.iterdir()]
        return {int(m[1]): (path, None if m[2] == "none" else int(m[2])) for path, m in named if m}


def _superseded(rounds: list[int], oldest: int) -> list[int]:
    """Return the rounds whose states are not needed by training that continues from round `oldest` or later."""
    older = sorted(round_ for round_ in rounds if round_ < oldest)
    return older[:-1]
