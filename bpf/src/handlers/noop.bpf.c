/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Drops each packet, with a handler that does nothing: what the engine costs. */
#include "xspin_handler.h"

XSPIN_PAYLOAD
{
	return XSPIN_SUCCESS;
}

XSPIN_CONTEXT(PAYLOAD);
XSPIN_LICENSE("Dual BSD/GPL");
