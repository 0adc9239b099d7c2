// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/internal/flags"
)

// completeValues has a shell complete the values of flags and arguments, with files only
// where files are wanted.
func completeValues(root *cobra.Command) {
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp)
	oneContext, contexts := argument(1, askContexts), argument(0, askContexts)
	files := cobra.FixedCompletions(nil, cobra.ShellCompDirectiveDefault)
	oneType := first(cobra.FixedCompletions(typeNames(), cobra.ShellCompDirectiveDefault)) // or a file
	arguments := map[string]cobra.CompletionFunc{
		"capture":        oneContext,
		"ctx activate":   contexts,
		"ctx deactivate": contexts,
		"ctx install":    first(files),
		"ctx rm":         contexts,
		"ctx show":       oneContext,
		"ctx trigger":    oneContext,
		"ddt describe":   oneType,
		"ddt ls":         argument(1, func(*cobra.Command) []string { return typeNames() }),
		"ddt pack":       oneType,
		"ddt unpack":     oneType,
		"demo inbox":     oneContext,
		"lab exec":       completeLabExec,
		"log":            oneContext,
		"mem":            oneContext,
		"mem read":       oneContext,
		"mem write":      oneContext,
		"object check":   files,
		"object new":     first(cobra.FixedCompletions(nil, cobra.ShellCompDirectiveFilterDirs)),
		"rules check":    files,
		"rules explain":  first(files),
		"rules test":     first(files),
		"run":            first(files),
		"send":           files,
		"stats":          argument(1, askInterfaces),
	}
	var visit func(*cobra.Command)
	visit = func(cmd *cobra.Command) {
		if f, ok := arguments[commandName(cmd)]; ok {
			cmd.ValidArgsFunction = f
			delete(arguments, commandName(cmd))
		}
		complete := func(f *pflag.Flag) {
			if c := flags.Completion(f); c != nil {
				_ = cmd.RegisterFlagCompletionFunc(f.Name, c) // fails only if one is registered already
			}
		}
		cmd.LocalNonPersistentFlags().VisitAll(complete)
		cmd.PersistentFlags().VisitAll(complete)
		for _, sub := range cmd.Commands() {
			visit(sub)
		}
	}
	visit(root)
	for name := range arguments {
		panic("completion of a command that is not there: " + name)
	}
}

// argument completes the first most arguments, or all with 0, with names, each once.
func argument(most int, names func(*cobra.Command) []string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if most > 0 && len(args) >= most {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return without(names(cmd), args), cobra.ShellCompDirectiveNoFileComp
	}
}

// first completes the first argument.
func first(f cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return f(cmd, args, typed)
	}
}

// without returns the words that are not among others.
func without(words, others []string) []string {
	return slices.DeleteFunc(slices.Clone(words), func(w string) bool { return slices.Contains(others, w) })
}

// completeLabExec completes the namespace. What follows it is another command line.
func completeLabExec(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveDefault
	}
	return labNames, cobra.ShellCompDirectiveNoFileComp
}

// typeNames returns the names of datatypes.
func typeNames() []string {
	var names []string
	for _, a := range ddt.Apps() {
		names = append(names, a.Name)
	}
	return append(names, ddt.Predefined()...)
}

// askTime bounds how long a shell waits for a daemon.
const askTime = time.Second

// ask returns what a command's daemon answers. It returns nothing if there is none, because
// a completion cannot show errors.
func ask[T any](cmd *cobra.Command, f func(*control.Client, context.Context) (T, error)) (answer T) {
	// The socket may come from the environment or a file.
	_ = cmd.Root().PersistentPreRunE(cmd, nil)
	socket, err := cmd.Flags().GetString("socket")
	if err != nil {
		return answer
	}
	c, err := control.Dial(socket)
	if err != nil {
		return answer
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(cmd.Context(), askTime)
	defer cancel()
	if a, err := f(c, ctx); err == nil {
		answer = a
	}
	return answer
}

func askContexts(cmd *cobra.Command) (names []string) {
	for _, x := range ask(cmd, (*control.Client).Contexts) {
		names = append(names, x.Name)
	}
	return names
}

func askInterfaces(cmd *cobra.Command) []string {
	if s := ask(cmd, (*control.Client).Status); s != nil {
		return s.Interfaces
	}
	return nil
}
