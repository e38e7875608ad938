"""The account of an import of characters outside ASCII, which the setting `ascii` removes.

The corpus has no count of them: a few typographic quotes must not change the digest of a corpus. It keeps the warning
that much of the text is gone.
"""

from dataclasses import dataclass

MUCH = 0.01  # share of characters whose loss changes words: of English text, typographic apostrophes alone are less
ADVICE = "import without --ascii to keep them (docs/own-data.md)"


@dataclass
class Removal:
    """Counts of one import: characters of all texts that were cut into sentences, and how many of them were removed."""

    characters: int = 0
    removed: int = 0

    def add(self, characters: int, removed: int) -> None:
        """Add the counts of a part."""
        self.characters += characters
        self.removed += removed

    @property
    def share(self) -> float:
        """Return the share of all characters that was removed, 0 to 1."""
        return self.removed / max(self.characters, self.removed, 1)

    @property
    def line(self) -> str:
        """Return the line that an import prints where characters were removed; a `MUCH` larger share has advice."""
        count = f"{self.removed:,} of {self.characters:,} characters ({self.share:.1%}) are outside ASCII"
        if self.share <= MUCH:
            return f"{count} and were removed"
        return f"{count} and were removed, which deletes or shortens words; {ADVICE}"

    @property
    def warnings(self) -> list[str]:
        """Return the warnings that the corpus keeps."""
        return [self.line] if self.share > MUCH else []

    @property
    def reason(self) -> str:
        """Return the end of an error about a text without words, with its reason; empty where nothing was removed."""
        if not self.removed:
            return ""
        return f": {self.removed:,} of its {self.characters:,} characters are outside ASCII and were removed; {ADVICE}"
