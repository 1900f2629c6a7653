"""The long-lived Ray actors and what they own."""
