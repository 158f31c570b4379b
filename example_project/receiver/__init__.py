"""The other side: a site that receives webhooks. It would be somebody else's project."""
