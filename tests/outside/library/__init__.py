"""Scripts of ours that use other people's libraries as their users do."""
