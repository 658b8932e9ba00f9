"""What tests share: helpers, and scripts that they start in processes of their own."""
