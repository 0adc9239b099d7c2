/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Drops messages, with three handlers that do nothing: what the engine costs. */
#include "xspin_message.h"

XSPIN_HEADER
{
	return XSPIN_SUCCESS;
}

XSPIN_PAYLOAD
{
	return XSPIN_SUCCESS;
}

XSPIN_COMPLETION
{
	return XSPIN_SUCCESS;
}

XSPIN_MESSAGES(HEADER | PAYLOAD | COMPLETION);
XSPIN_LICENSE("Dual BSD/GPL");
