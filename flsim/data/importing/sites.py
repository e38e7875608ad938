"""Names of sources that are part of authors' names: the site of a Stack Exchange dump, the file of a plain text.

Users of two sites have the same numbers, and authors of two texts the same lines. Two sources with one name would make
one author of two persons.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flsim.base.errors import InputError
from flsim.data.formats.posts import Format, unpacked_name, user_name
from flsim.data.formats.stackexchange import STACKEXCHANGE, site_of
from flsim.data.formats.text import TEXT
from flsim.data.importing.sources import Source, names_of


def with_sites(sources: Sequence[Source], formats: Sequence[Format], sites: Sequence[str]) -> list[Source]:
    """Return the sources with the sites of Stack Exchange dumps that the user named.

    Args:
        sources: the sources of an import.
        formats: their formats.
        sites: one site for each Stack Exchange dump, in their order; empty takes the sites from the files' names. Two
            dumps may have the same site here.

    Raises:
        InputError: there are more or fewer sites than dumps, a site is blank, a dump is a pipe without a site, or two
            sources have the same name.
    """
    dumps = [source.path for source, format in zip(sources, formats, strict=True) if format.name == STACKEXCHANGE.name]
    if sites:
        _refuse_wrong_sites(sources, sites, len(dumps))
        left = iter(sites)
        return [replace(source, site=next(left)) if source.path in dumps else source for source in sources]
    first: dict[tuple[str, str], Path] = {}
    for source, format in zip(sources, formats, strict=True):
        if format.name == STACKEXCHANGE.name:
            if source.is_pipe:
                raise InputError(f"{source.path}: a pipe has no name that tells the site of a dump; add --site NAME")
            key, advice = (format.name, site_of(source.path)), "add --site NAME once for each dump, in their order"
        elif format.name == TEXT.name:
            key, advice = (format.name, unpacked_name(source.path)), "rename one of the files"
        else:
            continue
        if key in first:
            raise InputError(
                f"{source.path}: has the name {key[1]!r}, as {first[key]} has, so that two authors would become one; "
                f"{advice}"
            )
        first[key] = source.path
    return list(sources)


def _refuse_wrong_sites(sources: Sequence[Source], sites: Sequence[str], dumps: int) -> None:
    if len(sites) != dumps:
        raise InputError(
            f"{names_of(sources)}: --site is there {len(sites)} times, and {dumps} sources are Stack Exchange dumps; "
            "add --site NAME once for each dump, in their order"
        )
    for site in sites:
        if not site.strip() or user_name(site) is None:
            raise InputError(f"--site {site!r}: no name of a site; name the site, such as ai.stackexchange.com")
