"""A transient progress bar: it disappears at the end of the work, and at Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlagen.logs import visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, ProgressColumn

# The terminal echoes Ctrl-C as ``^C`` behind the bar. A bar of full width would be moved to the
# line above by it, and stay on the screen.
_FREE_COLUMNS = 8


@contextmanager
def transient_bar(output: Console, *columns: ProgressColumn) -> Iterator[Progress]:
    """Yield a bar with these columns, and a last one that shortens the task's description."""
    from rich.constrain import Constrain
    from rich.progress import BarColumn, Progress, Task, TextColumn
    from rich.table import Column
    from rich.text import Text

    class Bar(Progress):
        def get_renderable(self) -> RenderableType:
            return Constrain(super().get_renderable(), max(output.width - _FREE_COLUMNS, 1))

    class Description(TextColumn):
        def render(self, task: Task) -> Text:
            return Text(visible(task.description, kept=""))

    description = Description("", table_column=Column(no_wrap=True, ratio=1))
    parts = (BarColumn(bar_width=16), *columns, description)
    try:
        with Bar(*parts, console=output, transient=True, expand=True) as progress:
            yield progress
    finally:
        output.show_cursor()  # an interrupt may come while the bar hides it
