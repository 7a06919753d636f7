"""Code blocks of pages."""

import re


def blocks(page, language):
    """Text of the code blocks of a page in one language, without their indentation."""
    return blocks_in(page.read_text(encoding="utf-8"), language)


def blocks_in(text, language):
    """The same, in a part of a page."""
    found = re.findall(rf"^( *)```{language}\b[^\n]*\n(.*?)^ *```$", text, re.M | re.S)
    return [re.sub(rf"^{indent}", "", block, flags=re.M) for indent, block in found]
