"""The prefill/decode handoff protocol: messages, transition tables and one sans-IO session per side."""
