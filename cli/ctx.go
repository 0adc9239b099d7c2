// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/daemon"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/internal/flags"
	"github.com/xspin/xspin/internal/regular"
	"github.com/xspin/xspin/nic"
)

// newCtxCmd returns `xspin ctx`.
func newCtxCmd() *cobra.Command {
	ctx := &cobra.Command{
		Use:   "ctx",
		Short: "Execution contexts of a running daemon",
		Long: `Look at the execution contexts of the daemon (xspin run), install more, arm and
disarm them, and remove them. Users who may attach to a context may look at it; the
rest is for root and the daemon's admins.`,
		Args: cobra.NoArgs,
	}
	ctx.AddCommand(newCtxLsCmd(), newCtxShowCmd(), newCtxInstallCmd(),
		newCtxDoCmd("activate", "", "Arm the rulesets of contexts", `Arm the rulesets of contexts. A context that was stopped, because a handler ran past
its time limit, or has failed, starts over first: with zeroed memory and new windows.`, (*control.Client).Activate),
		newCtxDoCmd("deactivate", "", "Disarm the rulesets of contexts, which stay installed", "", (*control.Client).Deactivate),
		newCtxDoCmd("rm", "removed", "Remove contexts: their messages end, their applications are detached", "", (*control.Client).Remove),
		newCtxTriggerCmd(), newCtxReloadCmd())
	return ctx
}

// socketFlag adds --socket to a command, and returns a function that dials it.
func socketFlag(cmd *cobra.Command) (dial func() (*control.Client, error)) {
	socket := cmd.Flags().String("socket", "", "socket of the daemon (default XSPIN_SOCKET, or "+control.Socket+")")
	return func() (*control.Client, error) {
		c, err := control.Dial(*socket)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", commandName(cmd), err)
		}
		return c, nil
	}
}

// commandName is what errors of a command start with, such as "ctx ls".
func commandName(cmd *cobra.Command) string {
	return strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ")
}

// seeContexts is the command line that shows the contexts of a daemon.
func seeContexts(socket string) string {
	if socket == control.Socket {
		return hint("ctx ls")
	}
	return hint("ctx ls --socket " + socket)
}

// newListCmd returns a command that lists what the daemon answers, as a table with a row
// for each item, or as a document.
func newListCmd[T any](name, short, key, head string, ask func(*control.Client, context.Context) ([]T, error), row func(*T) string) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "ls",
		Short:   short,
		Example: fmt.Sprintf("  xspin %[1]s\n  xspin %[1]s --json", name),
		Args:    cobra.NoArgs,
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	dial := socketFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := dial()
		if err != nil {
			return err
		}
		all, err := ask(c, cmd.Context())
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if asJSON {
			return writeJSON(cmd.OutOrStdout(), map[string]any{"schema": 1, key: append([]T{}, all...)})
		}
		w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 8, 2, ' ', 0)
		fmt.Fprintln(w, head)
		for i := range all {
			fmt.Fprintln(w, row(&all[i]))
		}
		return w.Flush()
	}
	return cmd
}

func newCtxLsCmd() *cobra.Command {
	const head = "NAME\tID\tSTATE\tTIER\tHOOK\tHANDLER\tINTERFACE\tATTACHED\tHANDLED\tDROPPED\tFAILED\tRULESETS"
	return newListCmd("ctx ls", "List the contexts", "contexts", head, (*control.Client).Contexts, func(x *control.ContextInfo) string {
		h := &x.HandlerStats
		return fmt.Sprintf("%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%s", x.Name, x.ID, stateAndLink(x), orElse(x.Tier, "user"), orElse(x.At, "-"), handlerName(x), orDash(x.Interface), attached(x.Attached),
			h.Handled, h.Dropped, h.Failed+h.Panics+h.Overruns, ruleNumbers(x))
	})
}

// stateAndLink returns a context's state, and the state of its link if that keeps packets
// from it.
func stateAndLink(x *control.ContextInfo) string {
	switch x.Link {
	case "down":
		return x.State + " (link down)"
	case "no carrier":
		return x.State + " (no carrier)"
	}
	return x.State
}

// handlerName returns which handlers a context has.
func handlerName(x *control.ContextInfo) string {
	if x.Object != nil && x.Handler != "" { // which has the messages that are handed over
		return x.Object.Name + "+" + x.Handler
	}
	if x.Object != nil {
		return x.Object.Name
	}
	return x.Handler
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// attached lists the processes that are attached.
func attached(peers []control.Peer) string {
	var all []string
	for _, p := range peers {
		s := fmt.Sprintf("pid %d", p.PID)
		if p.Observer {
			s += " (observer)"
		}
		all = append(all, s)
	}
	return orDash(strings.Join(all, ", "))
}

// ruleNumbers returns where the rulesets of a context are in the table.
func ruleNumbers(x *control.ContextInfo) string {
	var all []string
	for _, r := range x.Rules {
		name, _, _ := strings.Cut(r.Text, ":")
		if r.Number >= 0 {
			name = fmt.Sprintf("%d:%s", r.Number, name)
		}
		all = append(all, name)
	}
	if x.Triggered {
		all = append(all, "triggered")
	}
	return orDash(strings.Join(all, ", "))
}

func newCtxShowCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "show NAME",
		Short:   "All that the daemon knows of a context",
		Example: "  xspin ctx show inbox",
		Args:    wantArgs("NAME"),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	dial := socketFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := dial()
		if err != nil {
			return err
		}
		x, err := c.Context(cmd.Context(), args[0])
		if err != nil {
			return fmt.Errorf("ctx show: %w", err)
		}
		if asJSON {
			return writeJSON(cmd.OutOrStdout(), struct {
				Schema int `json:"schema"`
				*control.ContextInfo
			}{1, x})
		}
		return writeContext(cmd.OutOrStdout(), x)
	}
	return cmd
}

// costOfXDP says why a context is at xdp on an interface at tc, and what that costs others.
func costOfXDP(why string) string {
	return why + ". While a context is at xdp, senders at the other end of a veth pair have no TSO"
}

// writeContext describes a context.
func writeContext(out io.Writer, x *control.ContextInfo) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	state := stateAndLink(x)
	if !x.Since.IsZero() {
		state += " since " + x.Since.Local().Format(time.DateTime)
	}
	if x.Error != "" {
		state += ": " + x.Error
	}
	fmt.Fprintf(w, "context %d, %s: %s\n", x.ID, x.Name, state)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(w, "  %s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	if x.State == "stopped" || x.State == "failed" {
		row("way out", "%s: it starts over, with fresh memory", hint("ctx activate "+x.Name))
	}
	for _, warning := range x.Warnings {
		row("warning", "%s", warning)
	}
	where := ""
	if x.Tier == "kernel" {
		where = ", in the kernel"
	}
	if x.Object != nil && x.Handler != "" {
		row("handler", "%s%s%s; what that hands over goes to %s, on HPUs", x.Object.Name, params(x.Params), where, x.Handler)
	} else {
		row("handler", "%s%s%s", handlerName(x), params(x.Params), where)
	}
	switch {
	case x.AtWhy != "":
		row("hook", "%s: %s", x.At, costOfXDP(x.AtWhy))
	case x.At != "":
		row("hook", "%s", x.At)
	}
	row("interface", "%s", orDash(x.Interface))
	for _, r := range x.Rules {
		where := "not armed"
		if r.Number >= 0 {
			where = fmt.Sprintf("number %d, matched %d", r.Number, r.Matched)
		}
		row("ruleset", "%s (%s)", r.Text, where)
	}
	if x.Triggered {
		row("ruleset", "none: the host activates it, see xspin ctx trigger")
	}
	if x.Policy == "blocked-rr" {
		row("policy", "blocked-rr, sequences of %d bytes, %d virtual HPUs", x.Sequence, x.VHPUs)
	}
	for _, v := range x.Windows {
		size := "shared"
		if v.Size != 0 {
			size = v.Size.String()
		}
		row("window", "%s, %s, handlers %s, application %s", v.Name, size, orElse(v.Rights, "rwa"), orElse(v.App, v.DefaultApp()))
	}
	if x.Memory != 0 || x.HPUMemory != 0 {
		row("HPU memory", "%v, and %v for each HPU", x.Memory, x.HPUMemory)
	}
	for i := range x.Maps {
		row("map", "%s: %v", x.Maps[i].Name, &x.Maps[i])
	}
	var reserved []string
	for _, what := range slices.Sorted(maps.Keys(x.Reserved)) {
		if n := x.Reserved[what]; n > 0 {
			reserved = append(reserved, fmt.Sprintf("%d bytes of %s", n, what))
		}
	}
	if len(reserved) > 0 {
		row("handler memory", "%s", strings.Join(reserved, ", "))
	}
	for _, p := range x.Attached {
		what := "application"
		if p.Observer {
			what = "observer"
		}
		row(what, "pid %d, uid %d, gid %d, since %s", p.PID, p.UID, p.GID, p.Since.Local().Format(time.DateTime))
	}
	h := &x.HandlerStats
	if x.Tier == "kernel" {
		row("handlers", "%d returned, %d of these Drop, %d Fail", h.Handled, h.Dropped, h.Failed)
		row("CPUs", "%s", onCPUs(x.CPUs))
	} else {
		row("handlers", "%d returned, %d of these Drop, %d Fail; %d panicked, %d ran too long", h.Handled, h.Dropped, h.Failed, h.Panics, h.Overruns)
	}
	if h.Handled > 0 {
		row("handler time", "mean %v, p50 %s, p99 %s", h.HandlerSum/time.Duration(h.Handled), within(&h.HandlerTime, 50), within(&h.HandlerTime, 99))
	}
	if x.Tier == "kernel" {
		row("frames", "%d sent back, %d to the stack", h.Sent, h.ToStack)
		if h.Uncut > 0 || h.Mixed > 0 {
			row("trains", "%d to the stack, as handlers would write to packets that nobody cuts; %d dropped, as handlers wanted different things of their packets", h.Uncut, h.Mixed)
		}
		if x.Object != nil && x.Handler != "" {
			row("handed over", "%d packets, to handlers on HPUs", h.HandedOver)
		}
	} else {
		row("frames", "%d of handlers sent, %d not for lack of room, %d to the stack", h.Sent, h.SendFull, h.ToStack)
	}
	if h.Acks > 0 || h.AckFull > 0 {
		row("acks", "%d sent, %d not for lack of room", h.Acks, h.AckFull)
	}
	if m := x.MessageStats; m != nil {
		row("messages", "%d started, %d open, %d complete, %d failed, %d abandoned", m.Started, m.Open, m.Ended, m.Failed, m.Abandoned)
		if m.Refused > 0 {
			row("refused", "%d packets of messages that had nowhere to go: no receive posted, or too many open; see xspin log", m.Refused)
		}
	}
	if p := x.Pair; p != nil {
		row("events", "%d to the application, %d lost; %d events and requests that it has not taken", p.Events, p.EventsLost, p.Waiting)
		row("requests", "%d to the application, %d found no room at first; %d answers, %d outstanding", p.Requests, p.Full, p.Responses, p.Outstanding)
		if p.Broken {
			row("queue", "BROKEN: the application has written where it must not")
		}
	}
	for i, u := range h.User {
		if u.Count > 0 {
			row(fmt.Sprintf("counter %d", i), "%d, counted %d times, mean %.1f", u.Sum, u.Count, u.Mean())
		}
	}
	return w.Flush()
}

// onCPUs tells which CPUs have handled packets.
func onCPUs(packets []uint64) string {
	var all []string
	for cpu, n := range packets {
		if n > 0 {
			all = append(all, fmt.Sprintf("%d on CPU %d", n, cpu))
		}
	}
	return orDash(strings.Join(all, ", "))
}

func orElse(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

// params shows parameters as YAML on one line.
func params(p map[string]any) string {
	if len(p) == 0 {
		return ""
	}
	b, err := json.Marshal(p)
	if err != nil {
		return ""
	}
	return " " + string(b)
}

// contextFlags describe a context without a file.
type contextFlags struct {
	control.Context
	object, memory, hpuMemory, attach string
	params, windows                   []string
}

func newCtxInstallCmd() *cobra.Command {
	var f contextFlags
	cmd := &cobra.Command{
		Use:   "install FILE | --name NAME ...",
		Short: "Install a context (- is standard input)",
		Long: `Install a context. FILE has one entry of the list of contexts in the daemon's
configuration, as YAML or JSON. Its key activate says when it is armed: at once,
unless it is manual or attach. Without FILE, flags say what the context is. A context
installed in this way is gone when the daemon ends.

The handlers in this xspin (the daemon may be a different one):

` + indent(handlerList()) + `
With --tier kernel they are ` + nic.BuiltinObjects() + `,
or those of an object file: docs/kernel-handlers.md.`,
		Example: `  xspin ctx install inbox.yaml
  echo '{name: ping, handler: echo-icmp}' | xspin ctx install -
  xspin ctx install --name ping --tier kernel --handler echo-icmp
  xspin ctx install --name mine --object echo.bpf.o --rulesets 'echo: udp(7)'
  xspin ctx install --name files --tier kernel --handler deposit --window 'name: in, size: 64MiB'`,
		Args: wantArgs("[FILE]"),
	}
	cmd.Flags().StringVar(&f.Name, "name", "", "name of the context, instead of FILE")
	cmd.Flags().StringVar(&f.Interface, "interface", "", "interface, if the daemon has several")
	cmd.Flags().StringVar(&f.Tier, "tier", "", "where the handlers run: user or kernel (default user, or kernel with --object)")
	flags.OneOf(cmd.Flags(), "tier", []string{"user", "kernel"})
	cmd.Flags().StringVar(&f.Hook, "hook", "", "where handlers in eBPF are called: auto, xdp or tc; auto is the hook of the interface (default auto)")
	flags.OneOf(cmd.Flags(), "hook", []string{"auto", "xdp", "tc"})
	cmd.Flags().StringVar(&f.Handler, "handler", "", "handlers by name")
	cmd.Flags().StringVar(&f.object, "object", "", "file with handlers in eBPF")
	cmd.Flags().StringVar(&f.Rulesets, "rulesets", "", "rulesets in text form, see xspin rules; defaults to the handlers'")
	cmd.Flags().StringVar(&f.Format, "format", "", "message format; defaults to the rulesets'")
	cmd.Flags().StringArrayVar(&f.params, "param", nil, "set a parameter of the handlers, NAME=VALUE (repeatable)")
	cmd.Flags().StringArrayVar(&f.windows, "window", nil, "give the context a window, with the keys of a configuration (repeatable): 'name: in, size: 64MiB'")
	cmd.Flags().StringVar(&f.attach, "attach", "", "who may attach, beside root and the daemon's admins, with the keys of a configuration: 'users: [alice]'")
	cmd.Flags().StringVar(&f.Activate, "activate", "", "when the context is armed: start, attach or manual (default attach if an application has its messages, else start)")
	flags.OneOf(cmd.Flags(), "activate", []string{"start", "attach", "manual"})
	cmd.Flags().IntVar(&f.Messages, "messages", 0, "messages that may be in flight (default 4096, or 256 in the kernel)")
	cmd.Flags().StringVar(&f.memory, "memory", "", "HPU memory that all HPUs share, such as 64KiB (default: what the handlers need)")
	cmd.Flags().StringVar(&f.hpuMemory, "hpu-memory", "", "HPU memory of each HPU, such as 4KiB (default: what the handlers need)")
	dial := socketFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		doc, locate, err := contextToInstall(cmd, args, &f)
		if err != nil {
			return fmt.Errorf("ctx install: %s", ownLines(err))
		}
		c, err := dial()
		if err != nil {
			return err
		}
		x, err := c.Install(cmd.Context(), doc)
		if err != nil {
			return fmt.Errorf("ctx install: %s", ownLines(locate(err)))
		}
		for _, w := range x.Warnings {
			fmt.Fprintf(cmd.ErrOrStderr(), "warning: %s\n", w)
		}
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "context %d, %s: %s\n", x.ID, x.Name, x.State)
		return err
	}
	return cmd
}

// contextToInstall reads a context from a file or from flags. locate says where an error
// of the daemon is.
func contextToInstall(cmd *cobra.Command, args []string, f *contextFlags) (doc *control.Context, locate func(error) error, err error) {
	given := ""
	cmd.Flags().Visit(func(flag *pflag.Flag) {
		if flag.Name != "socket" {
			given = flag.Name
		}
	})
	switch {
	case len(args) > 0 && given != "":
		return nil, nil, fmt.Errorf("--%s goes without FILE, which says what the context is", given)
	case len(args) > 0:
		text, err := readAll(cmd, args[0])
		if err != nil {
			return nil, nil, err
		}
		file, err := daemon.ParseContext(args[0], text)
		if err != nil {
			return nil, nil, err
		}
		return &file.Context, file.Locate, nil
	case f.Name == "":
		return nil, nil, errors.New("missing argument: FILE, or --name and what the context has")
	}
	for _, p := range f.params {
		name, value, ok := strings.Cut(p, "=")
		if !ok || name == "" {
			return nil, nil, flags.Error("param", p, "want NAME=VALUE")
		}
		if f.Params == nil {
			f.Params = map[string]any{}
		}
		var v any
		if json.Unmarshal([]byte(value), &v) != nil {
			v = value // as text
		}
		f.Params[name] = v
	}
	for _, m := range []struct {
		name, text string
		into       *control.Size
	}{{"memory", f.memory, &f.Memory}, {"hpu-memory", f.hpuMemory, &f.HPUMemory}} {
		if m.text == "" {
			continue
		}
		n, err := memoryFlag(m.name, m.text)
		if err != nil {
			return nil, nil, err
		}
		*m.into = control.Size(n)
	}
	var errs []error
	for _, text := range f.windows {
		var w control.Window
		errs = append(errs, daemon.ParseFlag("window", text, &w))
		f.Windows = append(f.Windows, w)
	}
	if cmd.Flags().Changed("attach") {
		f.Attach = &control.Attach{}
		errs = append(errs, daemon.ParseFlag("attach", f.attach, f.Attach))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, nil, err
	}
	if f.object != "" {
		if f.Object, err = daemon.ReadObject(f.object); err != nil {
			return nil, nil, err
		}
		if f.Tier == "" {
			f.Tier = "kernel"
		}
	}
	return &f.Context, func(err error) error { return err }, nil
}

// maxDocument is more than anybody writes by hand, in bytes.
const maxDocument = 4 << 20

// readAll reads a file, or standard input for "-".
func readAll(cmd *cobra.Command, path string) ([]byte, error) {
	in := cmd.InOrStdin()
	if path != "-" {
		f, err := regular.Open(path)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, maxDocument+1))
	if err == nil && len(b) > maxDocument {
		err = fmt.Errorf("%s: more than %d bytes", path, maxDocument)
	}
	return b, err
}

// newCtxDoCmd returns a command that does the same with each of several contexts, and says
// what is done unless that is "".
func newCtxDoCmd(verb, done, short, long string, do func(*control.Client, context.Context, string) error) *cobra.Command {
	cmd := &cobra.Command{
		Use:     verb + " NAME...",
		Short:   short,
		Long:    long,
		Example: "  xspin ctx " + verb + " inbox",
		Args:    wantArgs("NAME..."),
	}
	dial := socketFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := dial()
		if err != nil {
			return err
		}
		var errs []error
		for _, name := range args {
			if err := do(c, cmd.Context(), name); err != nil {
				errs = append(errs, fmt.Errorf("ctx %s: %w", verb, err))
			} else if done != "" {
				fmt.Fprintf(cmd.OutOrStdout(), "context %s %s\n", name, done)
			}
		}
		return errors.Join(errs...)
	}
	return cmd
}

func newCtxTriggerCmd() *cobra.Command {
	var words []string
	var t control.Trigger
	var offset, length string
	cmd := &cobra.Command{
		Use:   "trigger NAME",
		Short: "Trigger a host-activated context",
		Long: `Trigger a host-activated context (triggered: true): its header handler runs, then
its payload handler for each slice of a range of a window, then its completion
handler. The words are for the handlers to read.`,
		Example: `  xspin ctx trigger push --window out --length 1MiB
  xspin ctx trigger push --words 9500,0x10 --window out --offset 4096 --length 100`,
		Args: wantArgs("NAME"),
	}
	cmd.Flags().StringSliceVar(&words, "words", nil, "up to four numbers")
	cmd.Flags().StringVar(&t.Window, "window", "", "the window that holds the message; without it the message is empty")
	cmd.Flags().StringVar(&offset, "offset", "0", "start of the message in the window, such as 64 or 4KiB")
	cmd.Flags().StringVar(&length, "length", "0", "length of the message, such as 64 or 4KiB")
	cmd.Flags().IntVar(&t.Slice, "slice", 0, "bytes for each payload handler (default: what fits into a datagram)")
	dial := socketFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(words) > len(t.Words) {
			return flags.Error("words", strings.Join(words, ","), fmt.Sprintf("want at most %d", len(t.Words)))
		}
		for i, s := range words {
			v, err := strconv.ParseUint(strings.TrimSpace(s), 0, 64)
			if err != nil {
				return flags.Error("words", s, "want numbers of 64 bits, decimal or 0x hexadecimal")
			}
			t.Words[i] = v
		}
		for _, f := range []struct {
			name, text string
			into       *int64
		}{{"offset", offset, &t.Offset}, {"length", length, &t.Length}} {
			var s control.Size
			if err := s.UnmarshalText([]byte(f.text)); err != nil {
				return flags.Error(f.name, f.text, "want a whole number of bytes, or one with KiB, MiB or GiB")
			}
			*f.into = int64(s)
		}
		if t.Window == "" && (t.Offset != 0 || t.Length != 0) {
			return errors.New("--offset and --length need a window: name it with --window")
		}
		c, err := dial()
		if err != nil {
			return err
		}
		if err := c.Trigger(cmd.Context(), args[0], t); err != nil {
			return fmt.Errorf("ctx trigger: %w", err)
		}
		return nil
	}
	return cmd
}

func newCtxReloadCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "reload",
		Short: "Make the daemon read its configuration file again",
		Long: `Make the daemon read its configuration file again and apply the changes: all of
them, or none. SIGHUP to the daemon does the same. Contexts that have not changed lose
no packet. Those that have begin anew, with counters and memory at 0; in between their
frames go to Linux.`,
		Args: cobra.NoArgs,
	}
	dial := socketFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := dial()
		if err != nil {
			return err
		}
		changes, err := c.Reload(cmd.Context())
		if err != nil {
			return fmt.Errorf("ctx reload: %w", err)
		}
		if len(changes) == 0 {
			changes = []string{"nothing has changed"}
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), strings.Join(changes, "\n"))
		return err
	}
	return cmd
}

// newRulesLsCmd returns `xspin rules ls`.
func newRulesLsCmd() *cobra.Command {
	const short, head = "The matching table of a running daemon, in its order", "INTERFACE\tNUMBER\tCONTEXT\tMATCHED\tRULESET"
	return newListCmd("rules ls", short, "rules", head, (*control.Client).Rules, func(r *control.TableRule) string {
		number := "-" // not armed
		if r.Number >= 0 {
			number = fmt.Sprint(r.Number)
		}
		return fmt.Sprintf("%s\t%s\t%s\t%d\t%s", r.Interface, number, r.Context, r.Matched, r.Text)
	})
}

// handlerList lists the handlers that are compiled in, one on a line.
func handlerList() string {
	var b bytes.Buffer
	w := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	for _, r := range handlers.All() {
		fmt.Fprintf(w, "%s\t%s\n", r.Name, r.Help)
	}
	_ = w.Flush()
	return b.String()
}

// indent indents lines by two columns.
func indent(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		b.WriteString("  " + line)
	}
	return b.String()
}
