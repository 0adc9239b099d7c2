// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

func TestReasonIsFoundInTheLog(t *testing.T) {
	for _, tc := range []struct{ name, log, reason, handler, place, source string }{
		{"Linux 6.12: a handler", `0: R1=ctx() R10=fp0
; struct xspin_her her = { .len = bpf_xdp_get_buff_len(ctx) }; @ xspin_handler.h:541
0: (bf) r6 = r1                       ; R1=ctx() R6_w=ctx()
Validating xspin_header() func#1...
7: R1=ctx() R2=mem(sz=64) R10=fp0
; XSPIN_HEADER { return 0; } @ mine.bpf.c:3
7: (b4) w0 = 0
8: (95) exit
Func#1 ('xspin_header') is safe for any args that match its prototype
Validating xspin_payload() func#2...
9: R1=ctx() R2=mem(sz=64) R10=fp0
; __u64 *p = xspin_memory(0, 8); @ mine.bpf.c:6
9: (85) call bpf_map_lookup_elem#1    ; R0_w=map_value_or_null(id=1)
; return *p; @ mine.bpf.c:8
10: (79) r0 = *(u64 *)(r0 +0)
R0 invalid mem access 'map_value_or_null'
processed 12 insns (limit 1000000) max_states_per_insn 0 total_states 0 peak_states 0 mark_read 0`,
			"R0 invalid mem access 'map_value_or_null'", "xspin_payload", "mine.bpf.c:8", "return *p;"},
		{"Linux 6.12: inside of the header's", `Validating xspin_payload() func#2...
; return xspin_load(ctx, 0, &b, her->len); @ mine.bpf.c:8
10: (79) r0 = *(u64 *)(r0 +0)
; return bpf_xdp_load_bytes(ctx, off, to, n); @ xspin_handler.h:230
from 10 to 12: R0=scalar()
12: (85) call bpf_xdp_load_bytes#189
R4 invalid zero-sized read: u64=[0,3]
processed 12 insns (limit 1000000)`,
			"R4 invalid zero-sized read: u64=[0,3]", "xspin_payload", "mine.bpf.c:8", "return xspin_load(ctx, 0, &b, her->len);"},
		{"Linux 6.12: of all functions together", `Validating xspin_payload() func#2...
; return 0; @ mine.bpf.c:8
10: (95) exit
Func#2 ('xspin_payload') is safe for any args that match its prototype
combined stack size of 2 calls is 608. Too large
processed 12 insns (limit 1000000)`,
			"combined stack size of 2 calls is 608. Too large", "", "", ""},
		{"Linux 7.3", `Validating xspin_payload() func#2...
; return *p; @ mine.bpf.c:8
10: (79) r0 = *(u64 *)(r0 +0)
R0 invalid mem access 'map_value_or_null'

Verification failed: Memory Safety: Access outside bounds

Reason:
  The pointer may be null.

At:
  xspin_payload @ mine.bpf.c:8:9
    return *p;

Causal path:
  xspin_payload @ mine.bpf.c:6:3

Suggestion:
  Compare it with null.

processed 12 insns (limit 1000000)`,
			"Memory Safety: Access outside bounds: The pointer may be null.", "xspin_payload", "mine.bpf.c:8", "return *p;"},
		{"Linux 7.3, with what is around", `Validating xspin_payload() func#2...
10: (db) lock *(u64 *)(r1 +0) += r2
R1 invalid mem access 'scalar'

Verification failed: Register Type Safety: Invalid dereference

Reason:
  R1 is an integer scalar here, not a pointer to memory.

At:
  xspin_payload @ mine.bpf.c:7:2
  Source context:
      5 | ...
      6 |         __u64 *n = 0;
  >>> 7 |         __sync_fetch_and_add(n, 1);
        |         ^-- error: invalid dereference of R1 (an integer scalar)
      8 |         return XSPIN_SUCCESS;
  Instruction context:
  >>> 10 | (db) lock *(u64 *)(r1 +0) += r2

processed 12 insns (limit 1000000)`,
			"Register Type Safety: Invalid dereference: R1 is an integer scalar here, not a pointer to memory.", "xspin_payload", "mine.bpf.c:7", "__sync_fetch_and_add(n, 1);"},
		{"Linux 7.3, where numbers of lines get longer", `Validating xspin_payload() func#2...
11: (79) r1 = *(u64 *)(r0 +0)
R0 invalid mem access 'map_value_or_null'

Verification failed: Register Type Safety: Invalid dereference

Reason:
  R0 may be NULL here (a nullable map value pointer). The program could dereference NULL on this
  path, so the verifier cannot prove this access is safe.

At:
  xspin_payload @ mine.bpf.c:9:5
  Source context:
       7 |         __u64 *n = bpf_map_lookup_elem(&mine, &zero);
       8 | ...
  >>>  9 |         *n += 1;
         |         ^-- error: invalid dereference of R0 (a nullable map value pointer)
      10 |         return XSPIN_SUCCESS;
  Instruction context:
      10 | (85) call bpf_map_lookup_elem#1
  >>> 11 | (79) r1 = *(u64 *)(r0 +0)

processed 12 insns (limit 1000000)`,
			"Register Type Safety: Invalid dereference: R0 may be NULL here (a nullable map value pointer). The program could dereference NULL on this path, so the verifier cannot prove this access is safe.", "xspin_payload", "mine.bpf.c:9", "*n += 1;"},
		{"Linux 7.3, with a number that is shorter than those around", `Validating xspin_payload() func#2...

Verification failed: Memory Safety: Access outside bounds

Reason:
  The verifier cannot prove it.

At:
  xspin_payload @ mine.bpf.c:8:9
  Source context:
       7 | 	__u32 n = 0;
  >>>  8 | 	return n + *p;
         | 	           ^-- error: access may be outside object bounds
       9 | ...
      10 | ...

processed 12 insns (limit 1000000)`,
			"Memory Safety: Access outside bounds: The verifier cannot prove it.", "xspin_payload", "mine.bpf.c:8", "return n + *p;"},
		{"nothing", "", "permission denied", "", "", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRejection(&ebpf.VerifierError{Cause: unix.EACCES, Log: strings.Split(tc.log, "\n")}, nil, false)
			if r.Reason != tc.reason || r.Handler != tc.handler || r.Place != tc.place || r.Source != tc.source {
				t.Errorf("reason %q, handler %q, place %q, source %q", r.Reason, r.Handler, r.Place, r.Source)
			}
			if null := strings.Contains(tc.log, "invalid mem access"); null != strings.Contains(r.Hint, "with null") {
				t.Errorf("hint %q", r.Hint)
			}
		})
	}
}

// At its limit of pending branches, Linux 6.18 says what it says of bad pointers.
func TestVerifierThatGivesUp(t *testing.T) {
	for err, want := range map[error]bool{unix.E2BIG: true, fmt.Errorf("load program: %w (hit verifier bug)", unix.EFAULT): true, unix.EINVAL: false} {
		if outOfBounds(err) != want {
			t.Errorf("%v: want %v", err, want)
		}
	}
}
