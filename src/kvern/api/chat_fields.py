"""Fields of a body that belong to conversations only."""

THINKING_FIELDS = frozenset(
    {
        "thinking_budget",
        "thinking_token_budget",
        "include_reasoning",
        "reasoning_effort",
        "reasoning",
        "enable_thinking",
        "thinking",
    }
)
CHAT_FIELDS = THINKING_FIELDS | frozenset(
    {
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template_kwargs",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "prediction",
    }
)
