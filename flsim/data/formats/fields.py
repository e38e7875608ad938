"""The rules for the author and the text of a post, which are the same in all formats of plain text.

A null is None, NaN (which pandas writes for a null), or a string of white space.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from flsim.data.formats.posts import Post, Reading, post_of, user_name

LONGEST_TEXT = 2**24  # characters
EXACT = 2**53  # from this value on, a float represents several integers
USER, TEXT, PROMPT = 0, 1, 2  # places in `columns`, and after them


class WrongFieldError(Exception):
    """The fault of an author, a text or a prompt, and why: the end of a sentence that begins with the field's name."""

    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.place, self.why = place, why


def posts_of(
    user: Any, text: Any, dropped: Counter[str], reading: Reading, split: str | None = None, prompt: Any = None
) -> Iterator[Post]:
    """Yield the post of an author and a text, or one post for each text of a list.

    Counts of dropped posts, by the first reason that applies: ``posts_without_user`` and ``posts_without_text`` (null
    or blank); ``posts_too_long`` (more than `LONGEST_TEXT` characters); ``posts_not_utf8`` (the author or the text
    contains half of a surrogate pair). An author is a string, or an integer, also as a float: 7, 7.0 and "7" are one
    author. The prompt is what these texts answer, or null. Raises WrongFieldError for other types.
    """
    if not (is_null(prompt) or isinstance(prompt, str)):
        raise WrongFieldError(PROMPT, "must be a string")
    texts = text if isinstance(text, list) and text else [text]
    name = author_of(user)
    for one in texts:
        if name is None:
            dropped["posts_without_user"] += 1
        elif is_null(one) or one == []:
            dropped["posts_without_text"] += 1
        elif not isinstance(one, str):
            raise WrongFieldError(TEXT, "must be a string or a list of strings")
        elif len(one) > LONGEST_TEXT:
            dropped["posts_too_long"] += 1
        elif any(user_name(string) is None for string in (name, one, prompt or "")):
            dropped["posts_not_utf8"] += 1
        else:
            yield post_of(name, one, reading, split, None if is_null(prompt) else prompt)


def author_of(user: Any) -> str | None:
    """Return an author's name; None for a null. Raises WrongFieldError for other types than strings and integers."""
    if is_null(user):
        return None
    if isinstance(user, float) and user.is_integer():
        if abs(user) >= EXACT:
            raise WrongFieldError(USER, "is a float too large to be a single integer; write authors as strings")
        return str(int(user))
    if isinstance(user, bool) or not isinstance(user, str | int):
        raise WrongFieldError(USER, "must be a string or an integer")
    return str(user)


def is_null(value: Any) -> bool:
    return (
        value is None
        or (isinstance(value, float) and math.isnan(value))
        or (isinstance(value, str) and not value.strip())
    )
