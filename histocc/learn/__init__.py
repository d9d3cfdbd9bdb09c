"""What learns without steps: few labels, in closed form, on the answers of a model that exists."""
