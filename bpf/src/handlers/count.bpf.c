/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Counts packets and bytes, in user counter 0. */
#include "xspin_handler.h"

enum to { stack, drop };

const volatile enum to to = stack;

XSPIN_PAYLOAD
{
	xspin_count(0, her->len);
	return to == stack ? xspin_to_stack(her) : XSPIN_DROP;
}

XSPIN_CONTEXT(PAYLOAD);
XSPIN_LICENSE("Dual BSD/GPL");
