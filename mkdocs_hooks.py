"""What pages written for a checkout need to become a site: marks for our tests, and links out of docs/, go."""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    without_marks = re.sub(r"^(```\w+) no-run$", r"\1", markdown, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"`\1`", without_marks)
