"""Print the packages that pyproject.toml declares, one a line, for setup.sh."""

import re
import sys
import tomllib
from pathlib import Path

# The CPU build has another name, and axe would bring Playwright's browsers.
ANOTHER_WAY = {"vllm", "axe-playwright-python"}

project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))
groups = project["dependency-groups"]
declared = [
    *project["project"]["dependencies"],
    *(
        one
        for extra in project["project"]["optional-dependencies"].values()
        for one in extra
    ),
    *(one for group in groups.values() for one in group if isinstance(one, str)),
]
by_name = {re.split(r"[\[<>=!~ ]", line)[0]: line for line in declared}
sys.stdout.writelines(
    f"{line}\n" for name, line in sorted(by_name.items()) if name not in ANOTHER_WAY
)
