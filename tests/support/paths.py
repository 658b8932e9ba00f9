"""Folders of the repository, and the blocks of code in its pages."""

import re
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
REPOSITORY = TESTS.parent
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
"""A block of a page: its indentation in a tab or a list, its language, and its lines."""
