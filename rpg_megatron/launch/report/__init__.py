"""``rpg-megatron report``: one HTML file about one run or several."""

from rpg_megatron.launch.report.page import write_report

__all__ = ["write_report"]
