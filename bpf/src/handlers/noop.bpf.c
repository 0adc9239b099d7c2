/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Drops each packet, as the handlers of a context without any would. */
#include "xspin_handler.h"

XSPIN_PAYLOAD
{
	return XSPIN_SUCCESS;
}

XSPIN_CONTEXT(PAYLOAD);
XSPIN_LICENSE("Dual BSD/GPL");
