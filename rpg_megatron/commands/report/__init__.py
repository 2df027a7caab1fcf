"""``rpg-megatron report``: one HTML file about one run or several."""

from rpg_megatron.commands.report.render import write_report

__all__ = ["write_report"]
