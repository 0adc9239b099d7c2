/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Puts messages into the context's window. */
#include "xspin_message.h"

XSPIN_HEADER
{
	return XSPIN_PROCEED;
}

XSPIN_MESSAGES(HEADER);
XSPIN_LICENSE("Dual BSD/GPL");
