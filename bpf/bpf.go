// SPDX-License-Identifier: Apache-2.0

// Package bpf holds the compiled eBPF programs and the Go side of what they
// share with user space, generated from the C in src. Package loader puts them
// to work; nothing else should need them.
package bpf

import "unsafe"

// The objects are committed: building XsPIN takes no clang. `make generate`
// rebuilds them with the pinned one, and CI fails when they differ.

//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter" -no-global-types -type xspin_meta -type xspin_table -type xspin_queue -type xspin_share -type xspin_stats -type xspin_config -type xspin_context -type xspin_field -type xspin_rule -type xspin_ruleset -type xspin_index_field -type xspin_limits -type xspin_policy -type xspin_context_flags -type xspin_meta_flags Ingress src/ingress.bpf.c
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter -DXSPIN_TC" -no-global-types IngressTC src/ingress_tc.bpf.c
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter" Bench src/bench.bpf.c
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter" -no-global-types -type xspin_path Impair src/impair.bpf.c
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter -Iinclude" -no-global-types HandlersEchoICMP src/handlers/echo_icmp.bpf.c
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter -Iinclude" -no-global-types HandlersEchoUDP src/handlers/echo_udp.bpf.c
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter -Iinclude" -no-global-types HandlersCount src/handlers/count.bpf.c
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter -Iinclude" -no-global-types HandlersNoopMessages src/handlers/noop_messages.bpf.c
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter -Iinclude" -no-global-types -type witness_head -type witness_run -type witness_order -type xspin_has HandlersWitness src/handlers/witness.bpf.c
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter -Iinclude" -no-global-types -type xspin_declared HandlersNoop src/handlers/noop.bpf.c
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter -Iinclude" -no-global-types -type xspin_constants -type xspin_counters -type xspin_word -type xspin_pair EnginePackets src/engine/packets.bpf.c
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter -Iinclude -DXSPIN_TC" -no-global-types EnginePacketsTC src/engine/packets.bpf.c
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter -Iinclude" -no-global-types HandlersDeposit src/handlers/deposit.bpf.c
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter -Iinclude" -no-global-types -type xspin_settings -type xspin_range -type xspin_message -type xspin_claims -type xspin_tally -type xspin_event -type xspin_order -type xspin_receive -type xspin_ring -type xspin_note -type xspin_scratch -type xspin_slip -type xspin_owed -type xspin_room -type xspin_past EngineMessages src/engine/messages.bpf.c
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter -Iinclude -DXSPIN_TC" -no-global-types EngineMessagesTC src/engine/messages.bpf.c

// The shared types under their short names.
type (
	Meta       = IngressXspinMeta
	Table      = IngressXspinTable
	Context    = IngressXspinContext
	Field      = IngressXspinField
	Rule       = IngressXspinRule
	Ruleset    = IngressXspinRuleset
	IndexField = IngressXspinIndexField
	Queue      = IngressXspinQueue
	Share      = IngressXspinShare
	Stats      = IngressXspinStats
	Config     = IngressXspinConfig
)

// Capacities, versions and flags of the shared types (src/xspin.h).
const (
	MaxRulesets = int(IngressXspinLimitsXSPIN_MAX_RULESETS)
	MaxContexts = int(IngressXspinLimitsXSPIN_MAX_CONTEXTS)
	MaxHPUs     = int(IngressXspinLimitsXSPIN_MAX_HPUS)
	MaxQueues   = int(IngressXspinLimitsXSPIN_MAX_QUEUES)
	MaxKey      = int(IngressXspinLimitsXSPIN_MAX_KEY)
	MaxFields   = int(IngressXspinLimitsXSPIN_MAX_FIELDS)
	MaxBounds   = int(IngressXspinLimitsXSPIN_MAX_BOUNDS)
	VecWords    = int(IngressXspinLimitsXSPIN_VEC_WORDS)
	MaxLocal    = int(IngressXspinLimitsXSPIN_MAX_LOCAL)
	MaxBuckets  = int(IngressXspinLimitsXSPIN_MAX_BUCKETS)
	MetaMagic   = uint16(IngressXspinLimitsXSPIN_META_MAGIC)
	MetaSize    = 64

	PolicyMessage    = uint8(IngressXspinPolicyXSPIN_POLICY_MESSAGE)
	PolicyPacket     = uint8(IngressXspinPolicyXSPIN_POLICY_PACKET)
	PolicyBlocked    = uint8(IngressXspinPolicyXSPIN_POLICY_BLOCKED)
	ContextTimestamp = uint8(IngressXspinContextFlagsXSPIN_CONTEXT_TIMESTAMP)
	ContextSpill     = uint8(IngressXspinContextFlagsXSPIN_CONTEXT_SPILL)
	ContextKernel    = uint8(IngressXspinContextFlagsXSPIN_CONTEXT_KERNEL)
	ContextHands     = uint8(IngressXspinContextFlagsXSPIN_CONTEXT_HANDS)
	ContextTC        = uint8(IngressXspinContextFlagsXSPIN_CONTEXT_TC)
	MetaEOM          = uint8(IngressXspinMetaFlagsXSPIN_META_EOM)
)

// MetaOf returns the metadata that the program leaves in the MetaSize bytes before a frame.
// front begins with these, and is aligned to 4 bytes. It panics if front is shorter.
func MetaOf(front []byte) *Meta {
	return (*Meta)(unsafe.Pointer((*[MetaSize]byte)(front)))
}

// A Range of buckets, see src/ingress.bpf.c. Size is a power of two, or 0.
type Range struct{ Base, Size int }
