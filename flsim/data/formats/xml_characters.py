"""Removal of the characters that XML 1.0 forbids, before a parser refuses them.

XML 1.0 (section 2.2) allows tab, line feed, carriage return, and all Unicode characters but the other control
characters, halves of surrogate pairs, U+FFFE and U+FFFF. Exporters that escape every character of a text write
references to forbidden ones, such as ``&#x0E;``, and a surrogate pair as two references. A parser must refuse such a
file.
"""

import codecs
import re

_REFERENCES = rb"(?:&#(?:x[0-9a-fA-F]{1,40}|[0-9]{1,40});)+"
_CONTROL = rb"[\x00-\x08\x0b\x0c\x0e-\x1f]+"
_PAIR = rb"\xed[\xa0-\xaf][\x80-\xbf]\xed[\xb0-\xbf][\x80-\xbf]"  # of surrogates, each as if it were a character
_HALF = rb"\xed[\xa0-\xbf][\x80-\xbf]"
_PAIR_IN_TEXT = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_NO_CHARACTER = rb"\xef\xbf[\xbe\xbf]"
_IN_UTF8 = re.compile(b"|".join((_REFERENCES, _CONTROL, _PAIR, _HALF, _NO_CHARACTER)))
_IN_OTHERS = re.compile(b"|".join((_REFERENCES, _CONTROL)))
# Quick tests, as few files have any of these. The first also finds some allowed references.
_SUSPECT_REFERENCE = re.compile(
    rb"&#(?:x0*(?:[0-8bcefBCEF]|1[0-9a-fA-F]|[dD][89a-fA-F][0-9a-fA-F]{2}|[fF]{3}[efEF]|[0-9a-fA-F]{6,})"
    rb"|0*(?:[0-8]|1[124-9]|2[0-9]|3[01]|5[5-7][0-9]{3}|6553[45]|[0-9]{7,}));"
)
_CONTROLS = bytes(code for code in range(32) if code not in b"\t\n\r")
_SUSPECT_BYTES = {b"\xed": re.compile(rb"\xed[\xa0-\xbf]"), b"\xef\xbf": re.compile(_NO_CHARACTER)}
# What the end of a chunk may have cut: a reference, or a surrogate pair as references or as bytes.
_HIGH = (  # references to the first half of a pair, U+D800 to U+DBFF or 55296 to 56319
    rb"&#(?:x0{0,36}[dD][89abAB][0-9a-fA-F]{2}"
    rb"|0{0,35}(?:55(?:29[6-9]|[3-9][0-9]{2})|56(?:[0-2][0-9]{2}|3[01][0-9])));"
)
_TAIL = re.compile(
    rb"(?:(?:%b)?(?:&(?:#x?[0-9a-fA-F]{0,40})?)?"
    rb"|(?:\xed[\xa0-\xaf][\x80-\xbf])?(?:\xed[\xa0-\xbf]?|\xef\xbf?)?)\Z" % _HIGH
)
_LONGEST_TAIL = 96  # bytes


class CharacterFilter:
    """A filter of the bytes of an XML file, chunk by chunk, that removes forbidden characters and joins surrogates.

    Line feeds stay, so that line numbers stay. The file is in UTF-8, or in another encoding that contains ASCII.

    Attributes:
        elements: number of elements, without children, in which a character was removed or a pair was joined.
    """

    def __init__(self, utf8: bool = True) -> None:
        self.elements = 0
        self._utf8 = utf8
        self._pattern = _IN_UTF8 if utf8 else _IN_OTHERS
        self._held = b""
        self._is_counted = False  # whether the element at hand is one of `elements`
        self._seen = 0  # where in the chunk the last change was

    def feed(self, chunk: bytes, final: bool = False) -> bytes:
        """Return what is known to be complete of the bytes so far, without forbidden characters."""
        chunk = self._held + chunk
        tail = None if final else _TAIL.search(chunk, max(0, len(chunk) - _LONGEST_TAIL))
        self._held = tail[0] if tail else b""
        chunk = chunk[: len(chunk) - len(self._held)]
        self._seen = 0
        allowed = chunk
        if self._is_suspect(chunk):
            allowed = self._pattern.sub(lambda match: self._allowed(match, chunk), chunk)
        self._is_counted = self._is_counted and b"<" not in chunk[self._seen :]
        return allowed

    def _is_suspect(self, chunk: bytes) -> bool:
        """Return whether a chunk may have forbidden characters."""
        return (
            len(chunk.translate(None, _CONTROLS)) < len(chunk)
            or _SUSPECT_REFERENCE.search(chunk) is not None
            or (
                self._utf8
                and any(start in chunk and pattern.search(chunk) for start, pattern in _SUSPECT_BYTES.items())
            )
        )

    def _allowed(self, match: re.Match[bytes], chunk: bytes) -> bytes:
        """Return the allowed characters of a match, and count the element of removed ones."""
        matched = match[0]
        is_text = matched[:1] != b"&"
        text = (
            matched.decode("utf-8", "surrogatepass") if is_text else "".join(map(_character, matched.split(b";")[:-1]))
        )
        joined = _PAIR_IN_TEXT.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), text)
        allowed = "".join(character for character in joined if is_allowed(character))
        if allowed == text:
            return matched
        if not self._is_counted or b"<" in chunk[self._seen : match.start()]:
            self.elements += 1
        self._is_counted, self._seen = True, match.start()
        return b"".join(b"&#x%X;" % ord(character) for character in allowed)


def _character(reference: bytes) -> str:
    """Return the character of ``&#x41`` or ``&#65``; U+FFFF, which is forbidden, for a number that is no character."""
    digits = reference[2:]
    number = int(digits[1:], 16) if digits.startswith(b"x") else int(digits)
    return chr(number) if number <= 0x10FFFF else "\uffff"


def is_allowed(character: str) -> bool:
    """Return whether XML 1.0 allows a character: the production ``Char``."""
    return (
        character in "\t\n\r"
        or " " <= character <= "\ud7ff"
        or "\ue000" <= character <= "\ufffd"
        or character > "\uffff"
    )


def utf16_decoder(head: bytes) -> codecs.IncrementalDecoder | None:
    """Return a decoder of a file that begins with these bytes; None if the file is not in UTF-16.

    The decoder lets halves of surrogate pairs pass.
    """
    names = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16", b"<\0": "utf-16-le", b"\0<": "utf-16-be"}
    name = names.get(head[:2])
    return codecs.getincrementaldecoder(name)("surrogatepass") if name else None
