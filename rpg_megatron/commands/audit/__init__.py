"""``rpg-megatron audit``: where engine and trainer differ."""

REQUEST, REPORT = "audit_request.json", "audit.json"
"""Files in the audit's folder: what the launcher asks for, and what rank 0 found."""

RANK = "rpg_megatron.commands.audit.rank"
"""What each rank runs."""
