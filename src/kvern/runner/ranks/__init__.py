"""The processes of all ranks but the first, the messages between them, and where experts are placed."""
